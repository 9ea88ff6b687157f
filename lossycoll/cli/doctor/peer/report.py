"""What the measurements mean for a job: a finding for each, and the options to set."""

from __future__ import annotations

from typing import Final

from ..findings import Finding, Severity
from .analysis import Flow, Rate
from .control import Peer
from .measure import Direction, Found
from .ports import Reached

LOSSY: Final = 0.001
"""Share of lost packets that is worth a word."""
PACE_SHARE: Final = 0.95
"""Of a policer's rate: what a pace leaves to others."""


def report(found: Found, host: str, port_range: str, own_mtu: int, peer: Peer) -> list[Finding]:
    """The findings, seen from this end."""
    out = [Finding("round trip", Severity.OK, f"{found.rtt_ms:.1f} ms")]
    out += _translation(found)
    for name, reached, way in (
        (f"to {host}", found.reach.out, found.out),
        (f"from {host}", found.reach.back, found.back),
    ):
        out += _ports(name, reached, port_range)
        if not reached.heard:
            continue
        out.append(_mtu(name, way, min(own_mtu, peer.mtu)))
        out += [_flow(name, way.flow)] if way.flow else []
        out += [_rate(name, way.rate, way.dropped)] if way.rate else []
        out += _idle(name, way.idle)
    return out


def settings(found: Found, own_mtu: int, peer: Peer, port_range: str) -> dict[str, str]:
    """Options for both ends, as variables."""
    out = {}
    reached = (found.reach.out, found.reach.back)
    if port_range == "0" and not all(one.is_open for one in reached):
        out["LOSSYCOLL_PORT_RANGE"] = "42000-42099"
    sizes = [way.mtu for way in (found.out, found.back) if way.mtu]
    if sizes and min(sizes) < min(own_mtu, peer.mtu, 9000):
        out["LOSSYCOLL_MTU"] = str(min(sizes))
    policed = [
        way.rate.got
        for way in (found.out, found.back)
        if way.rate is not None and way.rate.limit == "policer"
    ]
    if policed:
        out["LOSSYCOLL_PACE"] = str(int(PACE_SHARE * min(policed) * 1e6 / 8))
    return out


def _translation(found: Found) -> list[Finding]:
    if found.reach.seen is None:
        return []
    (address, port), (seen, its_port) = found.reach.seen
    if address != seen:
        advice = (
            "a NAT translates this host's address, and ranks give the one of their interface: join "
            "the hosts by a VPN and set LOSSYCOLL_INTERFACE to its interface, or train as a swarm"
        )
        text = f"{address}:{port} is seen as {seen}:{its_port}"
        return [Finding("address of this host", Severity.FAIL, text, advice)]
    if port != its_port:
        text = f"{address}, whose port {port} is seen as {its_port}"
        advice = "something translates ports, and ranks give their own: let it pass them unchanged"
        return [Finding("address of this host", Severity.FAIL, text, advice)]
    return [Finding("address of this host", Severity.OK, f"{address}, seen unchanged")]


def _ports(name: str, reached: Reached, port_range: str) -> list[Finding]:
    ports = "any port (LOSSYCOLL_PORT_RANGE is unset)" if port_range == "0" else port_range
    remedy = (
        f"let the firewalls pass {{}} to that end on {ports}, or set LOSSYCOLL_PORT_RANGE on all "
        f"ranks to ports that are open"
    )
    if not reached.tcp and not reached.udp:
        text = f"no port to try: {reached.busy} are taken by other programs"
        return [Finding(f"{name}: ports", Severity.FAIL, text, "widen LOSSYCOLL_PORT_RANGE")]
    blocked = {port: why for port, why in reached.tcp.items() if why}
    out = [
        _tried(
            f"{name}: TCP (control)",
            len(reached.tcp),
            [f"{port} ({why})" for port, why in blocked.items()],
            remedy.format("TCP"),
        )
    ]
    silent = [port for number, port in enumerate(reached.udp) if number not in reached.heard]
    out.append(
        _tried(
            f"{name}: UDP (data)",
            len(reached.udp),
            [str(port) for port in silent],
            remedy.format("UDP"),
        )
    )
    return out


def _tried(name: str, count: int, blocked: list[str], remedy: str) -> Finding:
    if not blocked:
        return Finding(name, Severity.OK, f"all {count} ports that were tried are reached")
    some = ", ".join(blocked[:4]) + (f" and {len(blocked) - 4} more" if len(blocked) > 4 else "")
    text = f"{count - len(blocked)} of {count} ports are reached; not {some}"
    return Finding(name, Severity.FAIL, text, remedy)


def _mtu(name: str, way: Direction, interfaces: int) -> Finding:
    most = min(interfaces, 9000)
    if way.mtu >= most:
        return Finding(f"{name}: packet size", Severity.OK, f"{way.mtu} bytes pass")
    text = f"{way.mtu} bytes pass, though the interfaces have {interfaces}"
    advice = (
        f"a tunnel or router on the path takes less: set LOSSYCOLL_MTU={way.mtu} on all ranks, or "
        f"the MTU of the interfaces"
    )
    return Finding(f"{name}: packet size", Severity.WARN, text, advice)


def _flow(name: str, flow: Flow) -> Finding:
    text = (
        f"{flow.lost:.2%} of {flow.sent:.0f} packets lost (up to {flow.run:.0f} in a row), "
        f"{flow.late:.2%} out of order, {flow.doubled:.2%} doubled"
    )
    if flow.lost < LOSSY:
        return Finding(f"{name}: loss", Severity.OK, text)
    advice = (
        "this path loses packets at a modest rate: training needs a method that brings them back "
        "(lossycoll.DriftBound, LOSSYCOLL_REPAIR=2 or LOSSYCOLL_FEC=auto)"
    )
    return Finding(f"{name}: loss", Severity.WARN, text, advice)


def _rate(name: str, rate: Rate, dropped: int) -> Finding:
    title = f"{name}: rate"
    own = f" ({dropped} packets found no room in the receiver's buffer)" if dropped else ""
    if rate.limit == "policer":
        text = (
            f"policed: {rate.burst / 1024:.0f} KiB pass at {rate.sent:.0f} Mbit/s, then "
            f"{rate.got:.1f} Mbit/s; {rate.lost:.0%} lost{own}"
        )
        pace = int(PACE_SHARE * rate.got * 1e6 / 8)
        advice = (
            f"a policer drops what exceeds its rate instead of queueing it: set "
            f"LOSSYCOLL_PACE={pace} (bytes per second)"
        )
        return Finding(title, Severity.WARN, text, advice)
    if rate.limit == "queue":
        text = (
            f"{rate.got:.1f} Mbit/s behind a queue of {rate.queue_ms:.0f} ms; {rate.lost:.0%} of "
            f"{rate.sent:.0f} Mbit/s lost{own}"
        )
        return Finding(title, Severity.OK, text)
    if rate.limit == "receiver":
        text = f"at least {rate.got:.0f} Mbit/s: the receiver took no more{own}"
        return Finding(title, Severity.OK, text)
    text = f"{rate.got:.0f} Mbit/s of {rate.sent:.0f} sent, {rate.lost:.1%} lost{own}"
    return Finding(title, Severity.OK, text)


def _idle(name: str, idle: dict[int, bool]) -> list[Finding]:
    if not idle:
        return []
    dead = [seconds for seconds, lives in sorted(idle.items()) if not lives]
    title = f"{name}: idle flows"
    if not dead:
        return [Finding(title, Severity.OK, f"alive after {max(idle)} s of silence")]
    lived = max([seconds for seconds in idle if seconds < dead[0]], default=0)
    text = f"forgotten after {lived} to {dead[0]} s of silence"
    advice = (
        "a firewall or NAT forgets UDP flows that are idle while ranks compute: raise its timeout "
        "(sysctl net.netfilter.nf_conntrack_udp_timeout) or let the ports pass in both directions"
    )
    return [Finding(title, Severity.WARN, text, advice)]

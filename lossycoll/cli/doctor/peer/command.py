"""``lossycoll doctor --peer HOST``: finds the other end, measures, and says what to set."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from lossycoll.errors import InterfaceError

from ...argtypes import whole
from ..checks import Finding, Severity
from .control import Control, Meeting, Peer, PeerError
from .measure import Direction, Flow, Found, Limits, Rate, measure
from .probes import Reached, open_ports

PORT: Final = 29499
WAIT_SECONDS: Final = 60
BUDGET_MIB: Final = 32
RATE_MBIT: Final = 1000
IDLE_SECONDS: Final = 31
MOST_IDLE: Final = 301
MOST_MIB: Final = 1024
IDLE_HELP: Final = (
    "seconds that flows are left idle, to see whether they are forgotten; 0: not at all"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network between two hosts (run on both)")
    group.add_argument(
        "--peer", type=_host, metavar="HOST", help="the other host, where this runs as well"
    )
    for name, kind, default, metavar, meaning in (
        ("peer-port", whole(1, 65535), PORT, "PORT", "TCP port at which the two find each other"),
        ("wait", whole(1, 3600), WAIT_SECONDS, "S", "seconds to look for the other end"),
        ("idle", whole(0, MOST_IDLE), IDLE_SECONDS, "S", IDLE_HELP),
        ("budget", whole(1, MOST_MIB), BUDGET_MIB, "MIB", "MiB sent each way to find the rate"),
        ("rate", whole(1, 100_000), RATE_MBIT, "MBIT", "fastest that is tried, in Mbit/s"),
    ):
        said = f"{meaning} (default: %(default)s)"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=said)


def _host(text: str) -> str:
    host, _, port = text.rpartition(":")
    if port.isdecimal() and (":" not in host or host.startswith("[")):
        wanted = f"--peer {host} --peer-port {port} on both ends"
        raise argparse.ArgumentTypeError(f"{text!r} has a port; {wanted} choose one")
    return text.removeprefix("[").removesuffix("]")


def run(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    """The findings, and the options to set; one finding where the ends don't find each other."""
    try:
        return _examine(options)
    except (PeerError, InterfaceError) as error:
        return [Finding(f"peer {options.peer}", Severity.FAIL, str(error))], {}


def _examine(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.interfaces import choose

    effective = Options.from_env()
    interface = choose(effective.interface, options.peer)
    hello = {
        "address": interface.address,
        "device": interface.name,
        "mtu": interface.mtu,
        "budget": options.budget << 20,
        "idle": options.idle,
        "rate": options.rate,
    }
    _tell(
        f"looking for the other end at {options.peer}, TCP port {options.peer_port}, for up to "
        f"{options.wait} s; run 'lossycoll doctor --peer' there, too"
    )
    control = Meeting(options.peer, options.peer_port, hello).find(options.wait)
    ports = open_ports(interface.address, effective.ports)
    try:
        found = measure(control, ports, _limits(control, options, interface.mtu), _tell)
    finally:
        ports.close()
        control.close()
    peer, ports_in_words = control.peer, str(effective.port_range)
    return (
        report(found, options.peer, ports_in_words, interface.mtu, peer),
        settings(found, interface.mtu, peer, ports_in_words),
    )


def _limits(control: Control, options: argparse.Namespace, mtu: int) -> Limits:
    peer = control.peer
    return Limits(
        min(mtu, peer.mtu),
        min(options.budget << 20, peer.budget),
        min(options.rate, peer.rate) * 1e6 / 8,
        min(options.idle, peer.idle, MOST_IDLE),
    )


def _tell(text: str) -> None:
    print(f"lossycoll doctor: {text}", file=sys.stderr, flush=True)


LOSSY: Final = 0.001
"""Share of lost packets that is worth a word."""
PACE_SHARE: Final = 0.95
"""Share of a policer's rate for the pace; the rest is for others."""


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

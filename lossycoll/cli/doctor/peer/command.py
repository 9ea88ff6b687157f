"""``lossycoll doctor --peer HOST[:PORT]``: finds the other end, measures, and says what to set."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Final

from lossycoll.errors import InterfaceError, OptionError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import place_of, place_text

from ...answer import CommandError
from ...argtypes import whole
from ..checks import Finding, Findings, Severity, fail_unless, warn_unless
from .arrivals import LOSSY, LOSSY_ADVICE, Flow, Rate
from .control import Limits, Meeting, PeerError
from .measure import LARGEST, Direction, Found, measure, open_ports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network between two hosts (run on both)")
    how = "the other host, where this runs as well; with a rank's control port: its running job"
    group.add_argument("--peer", type=_host, metavar="HOST[:PORT]", help=how)
    idle = "seconds that flows are left idle, to see whether they are forgotten; 0: not at all"
    for name, kind, default, metavar, meaning in (
        ("peer-port", whole(1, 65535), 29499, "PORT", "TCP port at which the two find each other"),
        ("wait", whole(1, 3600), 60, "S", "seconds to look for the other end"),
        ("idle", whole(0, 301), 31, "S", idle),
        ("budget", whole(1, 1024), 32, "MIB", "MiB sent each way to find the rate"),
        ("rate", whole(1, 100_000), 1000, "MBIT", "fastest that is tried, in Mbit/s"),
    ):
        said = f"{meaning} (default: %(default)s)"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=said)


def _host(text: str) -> str:
    if not _is_place(text):
        return text.removeprefix("[").removesuffix("]")
    try:
        return place_text(*place_of(text))
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _is_place(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return port.isdecimal() and (":" not in host or host.startswith("["))


def run(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    """The findings, and the options to set; one finding where the ends don't find each other."""
    try:
        if _is_place(options.peer):
            from . import job  # needs the engine, which may not load

            return job.examine(options.peer), {}
        return asyncio.run(_examine(options))
    except (PeerError, InterfaceError, CommandError) as error:
        return [Finding(f"peer {options.peer}", str(error), Severity.FAIL)], {}


async def _examine(options: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    from lossycoll.runtime.net.interfaces import choose

    effective = Options.from_env()
    interface = choose(effective.interface, options.peer)
    own = Limits(interface.mtu, options.budget << 20, options.idle, options.rate)
    _tell(
        f"looking for the other end at {options.peer}, TCP port {options.peer_port}, for up to "
        f"{options.wait} s; run 'lossycoll doctor --peer' there, too"
    )
    with contextlib.ExitStack() as undo:
        control = await Meeting(options.peer, options.peer_port, own).find(options.wait)
        undo.callback(control.writer.close)
        ports = open_ports(interface.address, effective.ports)
        undo.callback(ports.close)
        found = await measure(control, ports, _tell)
    ports_in_words, mtu = str(effective.port_range), control.limits.mtu
    findings = list(report(found, options.peer, ports_in_words, mtu))
    return findings, settings(found, mtu, ports_in_words)


def _tell(text: str) -> None:
    print(f"lossycoll doctor: {text}", file=sys.stderr, flush=True)


PACE_SHARE: Final = 0.95
"""Share of a policer's rate for the pace; the rest is for others."""


def report(found: Found, host: str, port_range: str, mtu: int) -> Findings:
    """The findings, seen from this end. ``mtu``: the smaller one of both interfaces."""
    yield Finding("round trip", f"{found.rtt_ms:.1f} ms")
    if found.seen is not None:
        yield _translation(*found.seen)
    for name, way in ((f"to {host}", found.out), (f"from {host}", found.back)):
        yield from _ports(name, way, port_range)
        if not way.heard:
            continue
        yield _packet_size(name, way.mtu, mtu)
        if way.flow:
            yield _loss(name, way.flow)
        if way.rate:
            yield _rate(name, way.rate, way.dropped)
        if way.idle:
            yield _idle(name, way.idle)


def settings(found: Found, mtu: int, port_range: str) -> dict[str, str]:
    """Options for both ends, as variables."""
    out = {}
    ways = (found.out, found.back)
    if port_range == "0" and not all(way.is_open for way in ways):
        out["LOSSYCOLL_PORT_RANGE"] = "42000-42099"
    sizes = [way.mtu for way in ways if way.mtu]
    if sizes and min(sizes) < min(mtu, LARGEST):
        out["LOSSYCOLL_MTU"] = str(min(sizes))
    policed = [way.rate.got for way in ways if way.rate and way.rate.limit == "policer"]
    if policed:
        out["LOSSYCOLL_PACE"] = str(_pace(min(policed)))
    if keepalive := _keepalive(*(way.idle for way in ways)):
        out["LOSSYCOLL_KEEPALIVE"] = keepalive
    return out


def _translation(own: tuple[str, int], seen: tuple[str, int]) -> Finding:
    name, address, port = "address of this host", *own
    if address != seen[0]:
        advice = (
            "a NAT translates this host's address, and ranks give the one of their interface: join "
            "the hosts by a VPN and set LOSSYCOLL_INTERFACE to its interface, or train as a swarm"
        )
        text = f"{address}:{port} is seen as {seen[0]}:{seen[1]}"
        return Finding(name, text, Severity.FAIL, advice)
    if port != seen[1]:
        text = f"{address}, whose port {port} is seen as {seen[1]}"
        advice = "something translates ports, and ranks give their own: let it pass them unchanged"
        return Finding(name, text, Severity.FAIL, advice)
    return Finding(name, f"{address}, seen unchanged")


def _ports(name: str, reached: Direction, port_range: str) -> Findings:
    if not reached.tcp and not reached.udp:
        text = f"no port to try: {reached.busy} are taken by other programs"
        yield Finding(f"{name}: ports", text, Severity.FAIL, "widen LOSSYCOLL_PORT_RANGE")
        return
    ports = "any port (LOSSYCOLL_PORT_RANGE is unset)" if port_range == "0" else port_range
    refused = [f"{port} ({why})" for port, why in reached.tcp.items() if why]
    silent = [str(port) for index, port in enumerate(reached.udp) if index not in reached.heard]
    for kind, count, blocked in (
        ("TCP (control)", len(reached.tcp), refused),
        ("UDP (data)", len(reached.udp), silent),
    ):
        found = f"all {count} ports that were tried are reached"
        if blocked:
            more = f" and {len(blocked) - 4} more" if len(blocked) > 4 else ""
            some = ", ".join(blocked[:4])
            found = f"{count - len(blocked)} of {count} ports are reached; not {some}{more}"
        advice = (
            f"let the firewalls pass {kind[:3]} to that end on {ports}, or set "
            f"LOSSYCOLL_PORT_RANGE on all ranks to ports that are open"
        )
        yield fail_unless(not blocked, f"{name}: {kind}", found, advice)


def _packet_size(name: str, passes: int, interfaces: int) -> Finding:
    is_whole = passes >= min(interfaces, LARGEST)
    though = "" if is_whole else f", though the interfaces have {interfaces}"
    advice = (
        f"a tunnel or router on the path takes less: set LOSSYCOLL_MTU={passes} on all ranks, or "
        f"the MTU of the interfaces"
    )
    return warn_unless(is_whole, f"{name}: packet size", f"{passes} bytes pass{though}", advice)


def _loss(name: str, flow: Flow) -> Finding:
    text = (
        f"{flow.lost:.2%} of {flow.sent:.0f} packets lost (up to {flow.run:.0f} in a row), "
        f"{flow.late:.2%} out of order, {flow.doubled:.2%} doubled"
    )
    advice = f"this path loses packets at a modest rate: {LOSSY_ADVICE}"
    return warn_unless(flow.lost < LOSSY, f"{name}: loss", text, advice)


def _rate(name: str, rate: Rate, dropped: int) -> Finding:
    text = {
        "policer": (
            f"policed: {rate.burst / 1024:.0f} KiB pass at {rate.sent:.0f} Mbit/s, then "
            f"{rate.got:.1f} Mbit/s; {rate.lost:.0%} lost"
        ),
        "queue": (
            f"{rate.got:.1f} Mbit/s behind a queue of {rate.queue_ms:.0f} ms; {rate.lost:.0%} of "
            f"{rate.sent:.0f} Mbit/s lost"
        ),
        "receiver": f"at least {rate.got:.0f} Mbit/s: the receiver took no more",
        "none": f"{rate.got:.0f} Mbit/s of {rate.sent:.0f} sent, {rate.lost:.1%} lost",
    }[rate.limit]
    own = f" ({dropped} packets found no room in the receiver's buffer)" if dropped else ""
    advice = (
        f"a policer drops what exceeds its rate instead of queueing it: set "
        f"LOSSYCOLL_PACE={_pace(rate.got)} (bytes per second)"
    )
    return warn_unless(rate.limit != "policer", f"{name}: rate", f"{text}{own}", advice)


def _pace(mbit: float) -> int:
    return int(PACE_SHARE * mbit * 1e6 / 8)


def _forgotten(idle: dict[int, bool]) -> tuple[int, int]:
    """Seconds after which a flow still lives, and after which it doesn't; 0: none was tried."""
    dead = min((seconds for seconds, lives in idle.items() if not lives), default=0)
    return max((seconds for seconds in idle if seconds < dead), default=0), dead


def _keepalive(*idles: dict[int, bool]) -> str:
    """Option that keeps flows alive where the usual one doesn't; "": it does, or nothing would."""
    ends = [lived or dead / 2 for lived, dead in map(_forgotten, idles) if dead]
    usual = Options().keepalive
    return f"{min(ends) / 3:.2g}" if ends and min(ends) < 3 * usual else ""


def _idle(name: str, idle: dict[int, bool]) -> Finding:
    lived, dead = _forgotten(idle)
    text = f"alive after {max(idle)} s of silence"
    if dead:
        text = f"forgotten after {lived} to {dead} s of silence"
    keepalive = _keepalive(idle)
    also = f", or set LOSSYCOLL_KEEPALIVE={keepalive} on all ranks" if keepalive else ""
    advice = (
        f"a firewall or NAT forgets UDP flows that are idle while ranks compute: raise its timeout "
        f"(sysctl net.netfilter.nf_conntrack_udp_timeout), let the ports pass in both directions"
        f"{also}"
    )
    return warn_unless(not dead, f"{name}: idle flows", text, advice)

"""The kernel's own network emulator, tc netem, where the kernel has it.

A packet passes the sender's port (an ifb device in the middle), between sites the gateways of both
(the ends of a cable from bridge to bridge), the receiver's port (the bridge's end of its cable) and
then the link (an ifb device at the receiver, a class per sender). All of them are netem queues
behind the place where aggregates are cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import LabError
from .bridge import DEVICE, Bridge, gateway_of, port_of
from .counters import Counters, HostCounts, LinkCounts, PortCounts, QueueCounts
from .network import ETHERNET_BYTES, Link, Network, Port, address_of, queue_bytes

LINKS: Final = "links"
"""The ifb device of a host."""
LIMIT: Final = 1_000_000
"""Packets in a queue without a rate: what the delay holds."""
NO_RATE: Final = "0bit"
"""A queue that is changed keeps a rate that isn't named."""
FIRST_CLASS: Final = 16


def link_arguments(link: Link, mtu: int) -> list[str]:
    """Arguments of netem for a link. LabError for what netem can't do.

    netem's jitter reorders, as a spread does. Its ``reorder`` sends packets ahead at once rather
    than hold them back, and only where there is a delay.
    """
    if why := _lacks(link):
        raise LabError(why)
    out = ["limit", str(_limit(link, mtu))]
    half = link.spread_ms / 2
    if link.delay_ms or link.jitter_ms or half:
        jitter = [f"{link.jitter_ms + half:g}ms"] if link.jitter_ms or half else []
        out += ["delay", f"{link.delay_ms + half:g}ms", *jitter]
    if link.burst > 1 and 0 < link.loss < 1:
        begin, go_on = link.chances
        out += ["loss", "gemodel", _percent(begin), _percent(1 - go_on)]
    elif link.loss:
        out += ["loss", "random", _percent(link.loss)]
    if link.duplicate:
        out += ["duplicate", _percent(link.duplicate)]
    if link.reorder:
        out += ["reorder", _percent(link.reorder)]
    rate = NO_RATE if link.rate_mbit is None else f"{link.rate_mbit * 1e6:.0f}bit"
    return [*out, "rate", rate]


def _lacks(part: Link | Port) -> str:
    if part.policer_ms is not None:
        return "netem makes no policers; use the backend switch"
    if isinstance(part, Link) and part.reorder and not part.delay_ms:
        return "netem reorders only where there is a delay; set delay_ms, or use switch"
    if isinstance(part, Link) and part.jitter_ms and part.spread_ms:
        return "netem makes either a jitter or a spread; set one, or use the backend switch"
    return ""


def rate_arguments(mbit: float | None, port: Port, mtu: int) -> list[str]:
    """Arguments of netem for one direction of a port."""
    if mbit is None:
        return ["limit", str(LIMIT), "rate", NO_RATE]
    bytes_ = queue_bytes(mbit, port, mtu)
    return ["limit", str(max(2, round(bytes_ / (mtu + ETHERNET_BYTES)))), "rate", f"{mbit:g}mbit"]


def _limit(link: Link, mtu: int) -> int:
    """netem counts what its delay holds as queued."""
    if link.rate_mbit is None:
        return LIMIT
    queue = queue_bytes(link.rate_mbit, link, mtu)
    held = link.rate_mbit * 125 * (link.delay_ms + link.jitter_ms + link.spread_ms)
    return math.ceil((queue + held) / (mtu + ETHERNET_BYTES))


def _percent(share: float) -> str:
    return f"{100 * share:.7g}%"


class Netem(Bridge):
    meaning = "the kernel's emulator: nearly everything; few kernels have it"
    commands = ("ip", "tc", "ethtool")

    @staticmethod
    def refusal(network: Network) -> str:
        parts: list[Link | Port] = [*network.all_ports, *network.all_links]
        return next(filter(None, map(_lacks, parts)), "")

    def prepare(self) -> None:
        self._redirect(self.middle, {down: up for up, down in self._ports()})
        for host in range(self.network.total_hosts):
            self._redirect(host, {DEVICE: LINKS})
            lines = [f"qdisc add dev {LINKS} root handle 1: htb default 1"]
            for sender in self.network.others(host):
                number, source = f"1:{_class(sender)}", f"{address_of(sender)}/32"
                lines += [
                    f"class add dev {LINKS} parent 1: classid {number} htb rate 100gbit "
                    f"quantum 200000",
                    f"filter add dev {LINKS} parent 1: protocol ip prio 1 u32 match ip src "
                    f"{source} flowid {number}",
                ]
            self.batch(host, "tc", lines)

    def apply(self, network: Network) -> None:
        ports = [network.port_of(host) for host in range(network.total_hosts)]
        ports += [network.gateway] * network.sites
        lines = [
            _replaced(f"dev {device} root handle 1:", rate_arguments(mbit, port, network.mtu))
            for ends, port in zip(self._ports() + self._gateways(), ports, strict=False)
            for device, mbit in zip(ends, (port.up_mbit, port.down_mbit), strict=True)
        ]
        self.batch(self.middle, "tc", lines)
        for host in range(network.total_hosts):
            lines = [
                _replaced(
                    f"dev {LINKS} parent 1:{_class(sender)} handle {_class(sender)}:",
                    link_arguments(network.link_of(sender, host), network.mtu),
                )
                for sender in network.others(host)
            ]
            self.batch(host, "tc", lines)

    def counters(self) -> Counters:
        """Runs of lost packets aren't counted: tc doesn't report them."""
        links = {}
        for host in range(self.network.total_hosts):
            queues = self._queues(host)
            for sender in self.network.others(host):
                one = queues[LINKS, f"{_class(sender)}:"]
                passed = one.packets - one.dropped
                links[sender, host] = LinkCounts(one.packets, one.dropped, passed, one.bytes)
        queues = self._queues(self.middle)
        hosts = [HostCounts(queues[up, "1:"], queues[down, "1:"]) for up, down in self._ports()]
        sites = [PortCounts(queues[up, "1:"], queues[down, "1:"]) for up, down in self._gateways()]
        sites = sites or [PortCounts(QueueCounts(), QueueCounts())]
        return Counters(dict(sorted(links.items())), tuple(hosts), tuple(sites))

    def _ports(self) -> list[tuple[str, str]]:
        """The devices of each host's port in the middle, up and down."""
        return [(f"up{host}", port_of(host)) for host in range(self.network.total_hosts)]

    def _gateways(self) -> list[tuple[str, str]]:
        """The devices of each site's gateway, up and down; none where there is one site."""
        sites = self.network.sites
        return [gateway_of(site) for site in range(sites)] if sites > 1 else []

    def _redirect(self, number: int, through: Mapping[str, str]) -> None:
        """Sends what arrives at devices through the queue of an ifb device each first."""
        devices, filters = [], []
        for device, ifb in through.items():
            devices += [f"link add {ifb} type ifb", f"link set {ifb} txqueuelen 1000 up"]
            filters += [
                f"qdisc add dev {device} handle ffff: ingress",
                f"filter add dev {device} parent ffff: protocol all matchall action mirred egress "
                f"redirect dev {ifb}",
            ]
        self.batch(number, "ip", devices)
        self.batch(number, "tc", filters)

    def _queues(self, number: int) -> dict[tuple[str, str], QueueCounts]:
        """Counters of a namespace's queues, by device and handle."""
        said = json.loads(self.tool(number, "tc", "-s", "-j", "qdisc"))
        return {
            (one["dev"], one["handle"]): QueueCounts(
                one["packets"] + one["drops"], one["bytes"], one["drops"]
            )
            for one in said
        }


def _class(sender: int) -> str:
    return f"{FIRST_CLASS + sender:x}"


def _replaced(where: str, arguments: Sequence[str]) -> str:
    return f"qdisc replace {where} netem {' '.join(arguments)}"

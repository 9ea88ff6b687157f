"""The kernel's own network emulator, tc netem, where the kernel has it.

A packet passes the sender's port (an ifb device in the middle), between sites the gateways of both
(the ends of a cable from bridge to bridge), the receiver's port (the bridge's end of its cable) and
then the link (an ifb device at the receiver, a class per sender). All of them are netem queues
behind the place where aggregates are cut.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

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
        for device in (device for ends in self._gateways() for device in ends):
            self._tc(self.middle, f"qdisc add dev {device} root handle 1: netem limit {LIMIT}")
        for host in range(self.network.total_hosts):
            up = f"up{host}"
            self._redirect(self.middle, port_of(host), up)
            self._tc(self.middle, f"qdisc add dev {up} root handle 1: netem limit {LIMIT}")
            out = port_of(host)
            self._tc(self.middle, f"qdisc add dev {out} root handle 1: netem limit {LIMIT}")
            self._redirect(host, DEVICE, LINKS)
            self._tc(host, f"qdisc add dev {LINKS} root handle 1: htb default 1")
            for sender in self.network.others(host):
                number = FIRST_CLASS + sender
                parent = f"dev {LINKS} parent 1:"
                rate = "htb rate 100gbit quantum 200000"
                self._tc(host, f"class add {parent} classid 1:{number:x} {rate}")
                leaf = f"{parent}{number:x} handle {number:x}: netem limit {LIMIT}"
                self._tc(host, f"qdisc add {leaf}")
                match = f"u32 match ip src {address_of(sender)}/32 flowid 1:{number:x}"
                self._tc(host, f"filter add {parent} protocol ip prio 1 {match}")

    def apply(self, network: Network) -> None:
        mtu = network.mtu
        for ends in self._gateways():
            self._shape(ends, network.gateway, mtu)
        for host in range(network.total_hosts):
            self._shape((f"up{host}", port_of(host)), network.port_of(host), mtu)
            for sender in self.network.others(host):
                number = FIRST_CLASS + sender
                where = f"dev {LINKS} parent 1:{number:x} handle {number:x}: netem"
                arguments = link_arguments(network.link_of(sender, host), mtu)
                self._tc(host, f"qdisc replace {where}", *arguments)

    def counters(self) -> Counters:
        """Runs of lost packets aren't counted: tc doesn't report them."""
        links, hosts = {}, []
        for host in range(self.network.total_hosts):
            queues = self._queues(host, LINKS)
            for sender in self.network.others(host):
                one = _queue(queues[f"{FIRST_CLASS + sender:x}:"])
                passed = one.packets - one.dropped
                links[sender, host] = LinkCounts(one.packets, one.dropped, passed, one.bytes)
            port = self._port(f"up{host}", port_of(host))
            hosts.append(HostCounts(port.up, port.down))
        sites = [self._port(*ends) for ends in self._gateways()]
        sites = sites or [PortCounts(QueueCounts(), QueueCounts())]
        return Counters(dict(sorted(links.items())), tuple(hosts), tuple(sites))

    def _gateways(self) -> list[tuple[str, str]]:
        """The devices of each site's gateway, up and down; none where there is one site."""
        sites = self.network.sites
        return [gateway_of(site) for site in range(sites)] if sites > 1 else []

    def _shape(self, devices: tuple[str, str], port: Port, mtu: int) -> None:
        """Gives devices of the middle the rates and queues of a port, up and down."""
        for device, mbit in zip(devices, (port.up_mbit, port.down_mbit), strict=True):
            change = f"qdisc replace dev {device} root handle 1: netem"
            self._tc(self.middle, change, *rate_arguments(mbit, port, mtu))

    def _port(self, *devices: str) -> PortCounts:
        up, down = (_queue(self._queues(self.middle, device)["1:"]) for device in devices)
        return PortCounts(up, down)

    def _redirect(self, number: int, device: str, through: str) -> None:
        """Sends what arrives at ``device`` through the queue of an ifb device first."""
        add, take_up = f"link add {through} type ifb", f"link set {through} txqueuelen 1000 up"
        self.batch(number, "ip", [add, take_up])
        self._tc(number, f"qdisc add dev {device} handle ffff: ingress")
        action = f"matchall action mirred egress redirect dev {through}"
        self._tc(number, f"filter add dev {device} parent ffff: protocol all {action}")

    def _tc(self, number: int, line: str, *more: str) -> None:
        self.tool(number, "tc", *line.split(), *more)

    def _queues(self, number: int, device: str) -> dict[str, Any]:
        said = json.loads(self.tool(number, "tc", "-s", "-j", "qdisc", "show", "dev", device))
        return {queue["handle"]: queue for queue in said}


def _queue(queue: Any) -> QueueCounts:
    return QueueCounts(queue["packets"] + queue["drops"], queue["bytes"], queue["drops"])

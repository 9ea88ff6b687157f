"""Between a Network and the numbers in the switch's memory (native/lab/lab.h)."""

from __future__ import annotations

from typing import Any, Final

from .._lab import lib
from .network import Link, Network, Port, queue_bytes

WIDTH: Final[int] = lib.LAB_HOSTS
NETWORK: Final = 10 << 24 | 77 << 16
"""10.77.0.0/24, the hosts' network. Nobody else can see it."""


def address_of(host: int) -> str:
    """The IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def chances(link: Link) -> tuple[float, float]:
    """Chances that a packet is lost: after one that wasn't, and after one that was."""
    if link.burst <= 1 or link.loss >= 1:
        return link.loss, link.loss
    end = 1 / link.burst
    return min(1.0, link.loss * end / (1 - link.loss)), 1 - end


def write(shared: Any, network: Network) -> None:
    """Writes the tables of ``network`` into a lab_shared."""
    shared.congestion = (network.congestion or "").encode()
    for host in range(network.total_hosts):
        shared.site_of[host] = network.shape.site_of(host)
        _write_port(shared.up[host], shared.down[host], network.port_of(host), network.mtu)
    for site in range(network.sites):
        _write_port(shared.site_up[site], shared.site_down[site], network.gateway, network.mtu)
    for sender, receiver in network.pairs():
        link = network.link_of(sender, receiver)
        entry = shared.link[sender * WIDTH + receiver]
        entry.begin, entry.go_on = chances(link)
        entry.double_ = link.duplicate
        entry.reorder = link.reorder
        entry.hold_ns = link.hold_ms * 1e6
        entry.delay_ns = link.delay_ms * 1e6
        entry.jitter_ns = link.jitter_ms * 1e6
        entry.spread_ns = link.spread_ms * 1e6
        _write_rate(entry.rate, link.rate_mbit, link, network.mtu)


def _write_port(up: Any, down: Any, port: Port, mtu: int) -> None:
    for rate, mbit in ((up, port.up_mbit), (down, port.down_mbit)):
        _write_rate(rate, mbit, port, mtu)


def _write_rate(entry: Any, mbit: float | None, part: Link | Port, mtu: int) -> None:
    entry.bytes_per_s = 0.0 if mbit is None else mbit * 125_000
    entry.queue_bytes = 0.0 if mbit is None else queue_bytes(mbit, part, mtu)
    entry.polices = part.policer_ms is not None

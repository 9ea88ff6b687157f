"""A laboratory in words: its network at the start, and what took packets by the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .counters import Counters, QueueCounts
from .network import QUEUE_MS, QUEUE_PACKETS, Link, Network, Port, queue_bytes
from .tcp import FlowTook, Took

ROWS_MAX = 16
"""Most rows of a printed table."""
DEFAULT_QUEUE = f"{QUEUE_MS:g} ms of the rate, and {QUEUE_PACKETS} packets at least"


@dataclass(frozen=True)
class Row:
    """Losses, by cause, of the packets that a host or a site sent, or was sent."""

    where: str  # as in "host 0 sent"
    packets: int  # offered to its port, or its gateway
    injected: int  # drawn to be lost on the links that it sends over
    queues: int  # found its queue full, or that of a link that it sends over
    policers: int  # found the bucket of its policer empty, or that of such a link

    @property
    def causes(self) -> tuple[int, int, int]:
        return self.injected, self.queues, self.policers

    @property
    def lost(self) -> int:
        return sum(self.causes)


def rows(counters: Counters) -> list[Row]:
    """Losses by host, or site, and direction. Nothing is in two rows."""
    out = []
    for number, host in enumerate(counters.hosts):
        links = [one for (sender, _), one in counters.links.items() if sender == number]
        injected = sum(link.lost for link in links)
        sent = [host.up, *(link.queue for link in links)]
        out += _both(f"host {number}", host.up.packets, injected, sent, host.down)
    if len(counters.sites) > 1:
        for number, site in enumerate(counters.sites):
            out += _both(f"site {number}", site.up.packets, 0, [site.up], site.down)
    return out


def _both(
    name: str, packets: int, injected: int, sent: Sequence[QueueCounts], down: QueueCounts
) -> list[Row]:
    queues, policers = sum(one.dropped for one in sent), sum(one.policed for one in sent)
    return [
        Row(f"{name} sent", packets, injected, queues, policers),
        Row(f"{name} received", down.packets, 0, down.dropped, down.policed),
    ]


def took(counters: Counters, named: Collection[tuple[int, int]] = ()) -> list[str]:
    """A table of what took packets: the rows that lost the most, the sum, and of it the links of
    ``named``."""
    found = rows(counters)
    sent = sum(host.up.packets for host in counters.hosts)
    causes = map(sum, zip(*(row.causes for row in found), strict=True))
    total = Row("all hosts sent", sent, *causes)
    worst = sorted((row for row in found if row.lost), key=lambda row: -row.lost)
    shown = [row for row in found if row in worst[:ROWS_MAX]]
    lines = [_line("", "packets", "injected", "queues", "policers")]
    lines += map(_row, (*shown, total))
    for pair in sorted(pair for pair in named if pair in counters.links)[:ROWS_MAX]:
        link = counters.links[pair]
        dropped, policed = link.queue.dropped, link.queue.policed
        offered = link.offered + dropped + policed
        name = "of it link {}-{}".format(*pair)
        lines.append(_row(Row(name, offered, link.lost, dropped, policed)))
    if len(worst) > len(shown):
        lines.append(f"and {len(worst) - len(shown)} more, in --counters")
    return lines


def _row(row: Row) -> str:
    shares = (f"{n} ({n / max(1, row.packets):.2%})" if n else "-" for n in row.causes)
    return _line(row.where, f"{row.packets}", *shares)


def _line(where: str, *columns: str) -> str:
    return f"{where:<18}" + "".join(f"{text:>19}" for text in columns)


def tcp_flows(flows: Sequence[FlowTook]) -> list[str]:
    """A line for each flow of TCP."""
    return [
        f"TCP {one.congestion} {one.pair[0]}-{one.pair[1]}: {one.bytes / 1e6:.1f} MB, "
        f"{one.mbit:.1f} Mbit/s, {one.resent} packets resent"
        for one in flows
    ]


def tcp(took: Took) -> list[str]:
    """A line for each flow of TCP, and one for the round trips beside them."""
    lines = tcp_flows(took.flows)
    if found := took.percentiles:
        p50, p99, ratio = found.values()
        lines.append(f"round trips 0-1: P50 {p50:.2f} ms, P99 {p99:.2f}, P99/P50 {ratio:.2f}")
    else:
        lines.append("round trips 0-1: none came back")
    return lines


def tcp_flows_data(flows: Sequence[FlowTook]) -> list[dict[str, Any]]:
    return [{**asdict(one), "mbit": one.mbit} for one in flows]


def tcp_data(took: Took) -> dict[str, Any]:
    return {"flows": tcp_flows_data(took.flows), "round_trips": took.percentiles}


def network(network: Network) -> list[str]:
    """Effects of the network on packets, a line for each part that has any."""
    sites = network.sites > 1
    parts: list[tuple[str, Link | Port]] = [
        ("each host", network.port),
        ("each link within a site" if sites else "each link", network.link),
        ("each site's gateway", network.gateway if sites else Port()),
        ("each link between sites", network.wan if sites else Link()),
        *((f"host {host}", port) for host, port in sorted(network.ports.items())),
        *((f"link {a}-{b}", link) for (a, b), link in sorted(network.links.items())),
    ]
    said = [
        f"{name}: {text}" for name, part in parts if (text := ", ".join(_words(part, network.mtu)))
    ]
    if network.congestion is not None:
        said.append(f"TCP: {network.congestion}")
    return said


def _words(part: Link | Port, mtu: int) -> list[str]:
    if isinstance(part, Port):
        rates = {"up": part.up_mbit, "down": part.down_mbit}
        return _rate(part, rates, mtu)
    burst = f" in bursts of {part.burst:g}" if part.burst > 1 else ""
    all_words = {
        f"{100 * part.loss:.4g}% lost{burst}": part.loss,
        f"{part.delay_ms:g} ms one way": part.delay_ms,
        f"jitter of {part.jitter_ms:g} ms to both sides, in order": part.jitter_ms,
        f"each packet up to {part.spread_ms:g} ms later, out of order": part.spread_ms,
        f"{100 * part.reorder:.4g}% held back by {part.hold_ms:g} ms": part.reorder,
        f"{100 * part.duplicate:.4g}% doubled": part.duplicate,
    }
    return [words for words, value in all_words.items() if value] + _rate(
        part, {"of its own": part.rate_mbit}, mtu
    )


def _rate(part: Link | Port, rates: dict[str, float | None], mtu: int) -> list[str]:
    limits = {name: mbit for name, mbit in rates.items() if mbit is not None}
    if not limits:
        return []
    kind = "policers" if part.policer_ms is not None else "queues"
    sizes = sorted({round(queue_bytes(mbit, part, mtu) / 1e3) for mbit in limits.values()})
    kb = " and ".join(map(str, sizes)) + " KB"
    ms = part.queue_ms if part.policer_ms is None else part.policer_ms
    if ms is not None:
        length = f"{ms:g} ms, {kb}"
    elif part.queue_packets is not None:
        length = f"{part.queue_packets} packets, {kb}"
    else:
        length = f"{DEFAULT_QUEUE}: {kb}"
    said = [f"{mbit:g} Mbit/s {name}" for name, mbit in limits.items()]
    return [*said, f"{kind} of {length}"]

"""Measures what a laboratory's links do, with counted packets, and sets it beside what was asked.

The packets' fate is counted at the receiver, so this tests the switch as well as its counters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .job import Role
from .laboratory import Lab
from .network import ETHERNET_BYTES, Link, Network, Port, queue_bytes

PORT: Final = 29399
UDP_BYTES: Final = 28
"""Bytes of the IPv4 and UDP headers."""
PACKETS_MIN: Final = 400
MBIT: Final = 400.0
"""At most, if nothing else is said."""
SEGMENTS: Final = 40
SIGMAS: Final = 4.0


@dataclass(frozen=True)
class Flow:
    """Numbered packets over one link, as they were sent and as they came (lab_probe_counts)."""

    sent: int
    received: int
    lost: int
    bursts: int
    doubled: int
    late: int
    overflowed: int
    seconds: float  # from the first that came to the last
    bytes: int
    sending: float = 0.0  # seconds from before the first was sent until the last came
    # found a queue of the network full, or the bucket of a policer empty: not what is drawn
    queued_out: int = 0

    @property
    def loss(self) -> float:
        """Share lost of what the queues let pass."""
        return (self.lost - self.queued_out) / max(1, self.sent - self.queued_out)

    @property
    def burst(self) -> float:
        return self.lost / self.bursts if self.bursts else 0.0

    @property
    def mbit(self) -> float:
        return self.bytes * 8e-6 / self.seconds if self.seconds > 0 else 0.0


def flow(
    lab: Lab,
    pair: tuple[int, int],
    *,
    packets: int,
    mbit: float = 0.0,
    segments: int = 1,
    port: int = PORT,
) -> Flow:
    """Sends ``packets`` datagrams over a link, ``segments`` per system call.

    ``mbit``: rate of the payload, 0 for as fast as it goes. A datagram has as much of it as the MTU
    takes.
    """
    size = lab.network.mtu - UDP_BYTES
    segments = max(1, min(segments, 65_507 // size))
    before = _queued_out(lab)
    idle = 300 + round(_longest_ms(lab.network, pair))
    with Role(lab, pair[1], "receive", port, packets, idle) as receiver:
        receiver.await_ready()
        to = lab.address(pair[1]), port
        with Role(lab, pair[0], "send", *to, packets, size, segments, mbit * 125_000) as sender:
            start = sender.answer()["start"]
        counts = receiver.answer()
    del counts["highest"]
    sending = counts.pop("last") - start
    return Flow(sent=packets, queued_out=_queued_out(lab) - before, sending=sending, **counts)


def _longest_ms(network: Network, pair: tuple[int, int]) -> float:
    """The most that a packet can take, from one host to another."""
    link = network.link_of(*pair)
    queues = sum(
        queue_bytes(mbit, part, network.mtu) / mbit / 125 for mbit, part in _rates(network, pair)
    )
    return link.delay_ms + link.jitter_ms + link.spread_ms + link.hold_ms + queues


def _rates(network: Network, pair: tuple[int, int]) -> list[tuple[float, Port | Link]]:
    """The rates in Mbit/s that packets from one host to another meet, and of what they are."""
    link = network.link_of(*pair)
    sender, receiver = network.port_of(pair[0]), network.port_of(pair[1])
    met: list[tuple[float | None, Port | Link]] = [
        (sender.up_mbit, sender),
        (link.rate_mbit, link),
        (receiver.down_mbit, receiver),
    ]
    if network.is_far(*pair):
        gateway = network.gateway
        met += [(gateway.up_mbit, gateway), (gateway.down_mbit, gateway)]
    return [(mbit, part) for mbit, part in met if mbit is not None]


def _queued_out(lab: Lab) -> int:
    counters = lab.counters()
    queues = [link.queue for link in counters.links.values()]
    queues += [queue for one in (*counters.hosts, *counters.sites) for queue in (one.up, one.down)]
    return sum(queue.dropped + queue.policed for queue in queues)


def round_trips(lab: Lab, pair: tuple[int, int], count: int = 20) -> list[float]:
    """Times in ms of those round trips that came back."""
    with Role(lab, pair[1], "echo", PORT) as echo:
        echo.await_ready()
        with Role(lab, pair[0], "ping", lab.address(pair[1]), PORT, count) as asker:
            times: list[float] = asker.answer()["ms"]
    return times


@dataclass(frozen=True)
class LinkCheck:
    """One link, asked against got; times in ms."""

    pair: tuple[int, int]
    link: Link
    round_trip_asked: float
    jitter: float  # of both ways together
    round_trip: float
    plain: Flow  # one datagram per call
    aggregated: Flow  # SEGMENTS

    @property
    def complaints(self) -> list[str]:
        """Complaints about what is not as asked, beyond what chance explains."""
        out = []
        for name, one in (("plain", self.plain), ("aggregated", self.aggregated)):
            low, high = bounds(self.link, one.sent)
            # A busy machine sends in bursts, so queues may drop a little.
            if one.queued_out > one.sent * 0.02:
                out.append(f"{name}: the network's queues dropped {one.queued_out} packets")
            elif one.overflowed:
                out.append(f"{name}: the receiver's socket overflowed {one.overflowed} times")
            elif not low <= one.loss <= high:
                out.append(f"{name}: lost {one.loss:.4%}, wanted {low:.4%} to {high:.4%}")
        least = self.round_trip_asked - self.jitter
        if self.round_trip < least:
            out.append(f"a round trip took {self.round_trip:.2f} ms, wanted {least:.2f} at least")
        return out

    def as_json(self) -> dict[str, Any]:
        """For JSON, which has no infinity: a round trip of which nothing came back is None."""
        trip = self.round_trip if math.isfinite(self.round_trip) else None
        return {**asdict(self), "round_trip": trip, "complaints": self.complaints}


def bounds(link: Link, packets: int) -> tuple[float, float]:
    """Between what shares the loss of ``packets`` packets should be, but for bad luck.

    Losses in a row count as one draw: the variance of a share is (2 burst - 1) times that of single
    losses, about (the correlation of a two-state chain at small loss).
    """
    spread = math.sqrt(link.loss * (1 - link.loss) * (2 * link.burst - 1) / packets)
    slack = SIGMAS * spread + 2 * SIGMAS * link.burst * (link.loss > 0) / packets
    return max(0.0, link.loss - slack), min(1.0, link.loss + slack)


def verify(
    lab: Lab, pairs: Sequence[tuple[int, int]] | None = None, mbit: float = MBIT
) -> Iterator[LinkCheck]:
    """Measures links one after the other; None: those of :func:`chosen`. ``mbit``: what is offered
    at most; less, where a rate is less than twice of it."""
    network, frame = lab.network, lab.network.mtu + ETHERNET_BYTES
    for pair in pairs or chosen(network):
        there, back = network.link_of(*pair), network.link_of(pair[1], pair[0])
        # Half of a link's rate keeps its queues short: all loss is then drawn. Two seconds of it.
        rate = min([mbit, *(limit / 2 for limit, _ in _rates(network, pair))])
        packets = min(40_000, max(PACKETS_MIN, int(rate * 250_000 / frame)))
        times = round_trips(lab, pair)
        yield LinkCheck(
            pair,
            there,
            there.delay_ms + back.delay_ms,
            there.jitter_ms + back.jitter_ms,
            statistics.median(times) if times else math.inf,
            flow(lab, pair, packets=packets, mbit=rate),
            flow(lab, pair, packets=packets, mbit=rate, segments=SEGMENTS),
        )


def chosen(network: Network) -> list[tuple[int, int]]:
    """From the first host of each site to each other one of it, from the first of all to the first
    of each other site, and all of these ways back."""
    pairs = []
    for site in range(network.sites):
        first, *others = network.hosts_of(site)
        pairs += [(first, other) for other in others]
    pairs += [(0, network.hosts_of(site)[0]) for site in range(1, network.sites)]
    return [way for a, b in pairs for way in ((a, b), (b, a))]


@dataclass(frozen=True)
class GatewayCheck:
    """A site's way to another, which was offered more than its rate: what got through, in Mbit/s of
    frames."""

    sites: tuple[int, int]
    asked: float
    offered: float
    got: float
    dropped: int

    @property
    def complaints(self) -> list[str]:
        """Complaints about what is not as asked; to get less than the rate is the machine's."""
        most = self.asked * 1.05  # a gateway lets the first packets pass at once
        if self.got > most:
            return [f"{self.got:.1f} Mbit/s got through, wanted at most {most:.1f}"]
        return []


def verify_gateways(lab: Lab) -> Iterator[GatewayCheck]:
    """Offers each site's gateway more than its rate, from its first host to the next site's.
    Gateways without a rate aren't measured."""
    network = lab.network
    rates = [rate for rate in (network.gateway.up_mbit, network.gateway.down_mbit) if rate]
    if network.sites < 2 or not rates:
        return
    asked, frame = min(rates), network.mtu + ETHERNET_BYTES
    offered = asked * 1.25
    packets = min(max(PACKETS_MIN, int(offered * 125_000 / frame)), 400_000)  # a second, or less
    for site in range(network.sites):
        other = (site + 1) % network.sites
        pair = (network.hosts_of(site)[0], network.hosts_of(other)[0])
        payload = offered * (network.mtu - UDP_BYTES) / frame
        one = flow(lab, pair, packets=packets, mbit=payload, segments=SEGMENTS)
        # From when the first packet came at the soonest: how late it is has nothing to say.
        link = network.link_of(*pair)
        seconds = one.sending - (link.delay_ms - link.jitter_ms) / 1e3
        got = one.received * frame * 8e-6 / seconds if seconds > 0 else 0.0
        yield GatewayCheck((site, other), asked, offered, got, one.queued_out)

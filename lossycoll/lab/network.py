"""A laboratory's network as pure data: sites, hosts, their ports, and the links between.

A packet goes through the sender's port, the link, and the receiver's port; between two sites also
through the gateways of both, before and behind the link. Delays are one-way: a round trip has two.
Shares (loss, duplicate, reorder) are fractions of all packets, each as long as the MTU allows,
whatever aggregates the kernel carries them in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import permutations
from typing import Any, Final

from ..errors import OptionError
from ..options.ranges import is_real, is_whole

HOSTS_MAX: Final = 64


def address_of(host: int) -> str:
    """The IPv4 address of a host, in a network that nobody else can see."""
    return f"10.77.0.{host + 1}"


def wrong(what: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"{what} is {value!r}, wanted {wanted}")


def check_whole(what: str, value: object, low: int, high: int) -> None:
    """Refuses what isn't a whole number of that range, by OptionError."""
    if not is_whole(value, low, high):
        raise wrong(what, value, f"a whole number from {low} to {high}")


ETHERNET_BYTES: Final = 14
QUEUE_MS: Final = 25.0
"""A queue's length where nothing is said, but QUEUE_PACKETS at least: long enough that TCP and
lossycoll fill the rate without losing much, short of what home routers have."""
QUEUE_PACKETS: Final = 64
QUEUES: Final = ("queue_packets", "queue_ms", "policer_ms")
"""Queues before a rate: one of these, or the default queue."""


def check_congestion(name: object) -> None:
    """Refuses what can't be the name of a congestion control, by OptionError."""
    if not (isinstance(name, str) and re.fullmatch(r"[a-z0-9_-]{1,15}", name)):
        raise wrong("congestion", name, "a name such as cubic, reno or bbr")


def check_real(what: str, value: object, low: float, high: float, wanted: str) -> None:
    if not is_real(value, low, high):
        raise wrong(what, value, wanted)


def _check_rates(what: str, part: Link | Port, *rates: str) -> None:
    """The rates of these names, and what stands before them."""
    for name in rates:
        mbit, wanted = getattr(part, name), "0.01 to 1000000 Mbit/s, or None for no limit"
        if mbit is not None:
            check_real(f"{what} {name}", mbit, 0.01, 1_000_000, wanted)
    given = [name for name in QUEUES if getattr(part, name) is not None]
    if len(given) > 1:
        wanted = f"either {' or '.join(given)}"
        raise wrong(f"{what} {given[0]}", getattr(part, given[0]), wanted)
    if part.queue_packets is not None and not is_whole(part.queue_packets, 1, 1_000_000):
        raise wrong(f"{what} queue_packets", part.queue_packets, "1 to 1000000 packets")
    for name in ("queue_ms", "policer_ms"):
        if getattr(part, name) is not None:
            check_real(f"{what} {name}", getattr(part, name), 1e-3, 60_000, "0.001 to 60000 ms")
    if part.policer_ms is not None and not any(getattr(part, name) for name in rates):
        raise wrong(f"{what} policer_ms", part.policer_ms, "a rate that it polices, too")


@dataclass(frozen=True)
class Link:
    """From one host to another, in one direction."""

    loss: float = 0.0  # fraction of packets lost, 0 to 1
    # mean number of packets lost in a row. 1 means each on its own; more is a Gilbert-Elliott
    # channel whose bad state loses everything (Elliott, Bell System Technical Journal 42, 1963)
    burst: float = 1.0
    delay_ms: float = 0.0  # one-way delay; a round trip has two
    # how far the delay wanders to both sides, within some 10 ms; order is kept
    jitter_ms: float = 0.0
    # up to how much later each packet comes, drawn uniformly for each by itself: packets overtake
    # each other
    spread_ms: float = 0.0
    reorder: float = 0.0  # fraction of packets that are held back behind what follows
    hold_ms: float = 1.0  # by how much they are
    duplicate: float = 0.0  # fraction of packets that arrive twice
    rate_mbit: float | None = None  # rate of this link alone, Mbit/s; None for no limit
    # length of the queue before the rate, which drops what doesn't fit. By default 25 ms of the
    # rate, and 64 packets at least
    queue_packets: int | None = None
    queue_ms: float | None = None  # the same in time
    # no queue, but a token bucket of this time of the rate: what finds it empty is dropped. Only
    # one of the three may be set
    policer_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "reorder", "duplicate"):
            check_real(f"link's {name}", getattr(self, name), 0, 1, "a fraction, 0 to 1")
        check_real("link's burst", self.burst, 1, 1e6, "1 or more packets")
        for name in ("delay_ms", "jitter_ms", "spread_ms", "hold_ms"):
            check_real(f"link's {name}", getattr(self, name), 0, 60_000, "0 to 60000 ms")
        if self.jitter_ms > self.delay_ms:
            wanted = f"at most delay_ms, {self.delay_ms:g}, as it goes to both sides"
            raise wrong("link's jitter_ms", self.jitter_ms, wanted)
        if self.burst > 1 and self.loss < 1 and self.loss > self.burst / (self.burst + 1) + 1e-9:
            least = self.loss / (1 - self.loss)
            raise wrong(
                "link's burst",
                self.burst,
                f"at least {least:.6g} for a loss of {self.loss:g}: shorter bursts can't lose so "
                f"many packets",
            )
        _check_rates("link's", self, "rate_mbit")

    @property
    def mean_burst(self) -> float:
        """The mean number of packets lost in a row; at a burst of 1 that is 1 / (1 - loss)."""
        if self.burst > 1 or self.loss >= 1:
            return self.burst
        return 1 / (1 - self.loss)

    @property
    def chances(self) -> tuple[float, float]:
        """Chances that a packet is lost: after one that wasn't, and after one that was."""
        if self.burst <= 1 or self.loss >= 1:
            return self.loss, self.loss
        end = 1 / self.burst
        return min(1.0, self.loss * end / (1 - self.loss)), 1 - end

    @property
    def only_loses(self) -> bool:
        """True if loss is all that is asked for, so that the kernel's packet filter will do."""
        return replace(self, loss=0.0, burst=1.0) == Link()


@dataclass(frozen=True)
class Port:
    """Port of a host or a site: a rate each way, with a queue before it."""

    up_mbit: float | None = None  # rate to the network, Mbit/s; None for no limit
    down_mbit: float | None = None  # rate from the network, Mbit/s; None for no limit
    # before each rate, as a link's
    queue_packets: int | None = None
    queue_ms: float | None = None
    policer_ms: float | None = None

    def __post_init__(self) -> None:
        _check_rates("port's", self, "up_mbit", "down_mbit")


@dataclass(frozen=True)
class Network:
    """A laboratory's network. Numbers count from 0 through all sites: the hosts of a site follow
    each other, and so do the ranks of a host."""

    # how many there are, 2 to 64 in all; where there are several sites, how many each has
    hosts: int = 2
    link: Link = Link()  # what joins each host to each other one of its site, in each direction
    port: Port = Port()  # how each host is connected
    # the links that differ, by (sender, receiver)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    ports: Mapping[int, Port] = field(default_factory=dict)  # the ports that differ, by host
    mtu: int = 1500  # largest IP packet, in bytes
    # of everything drawn. Each link has a sequence of its own, so what it loses depends only on how
    # many packets it is given
    seed: int = 1
    sites: int = 1  # how many there are
    # how many a job of the whole laboratory has on each host; a tuple has a number for each host
    ranks: int | tuple[int, ...] = 1
    wan: Link = Link()  # what joins each host to each one of another site, in each direction
    gateway: Port = Port()  # how each site is connected to the others: rates that its hosts share
    # the congestion control that TCP has by default on all hosts, as in "cubic"; None for the
    # machine's
    congestion: str | None = None

    def __post_init__(self) -> None:
        if self.congestion is not None:
            check_congestion(self.congestion)
        check_whole("sites", self.sites, 1, HOSTS_MAX)
        check_whole("hosts", self.hosts, 2 if self.sites == 1 else 1, HOSTS_MAX // self.sites)
        if isinstance(self.ranks, tuple) and len(self.ranks) != self.total_hosts:
            wanted = f"one number, or one for each of {self.total_hosts} hosts"
            raise wrong("ranks", self.ranks, wanted)
        for number in self.ranks_by_host:
            check_whole("ranks", number, 1, 64)
        # What every IPv4 host must accept (RFC 791), and the most that a TAP device in Linux takes.
        check_whole("mtu", self.mtu, 576, 65521)
        check_whole("seed", self.seed, 0, (1 << 63) - 1)
        for sender, receiver in self.links:
            self.check_link(sender, receiver)
        for host in self.ports:
            self.check_host(host)

    @property
    def total_hosts(self) -> int:
        return self.sites * self.hosts

    @cached_property
    def ranks_by_host(self) -> tuple[int, ...]:
        if isinstance(self.ranks, tuple):
            return self.ranks
        return (self.ranks,) * self.total_hosts

    @property
    def world(self) -> int:
        return sum(self.ranks_by_host)

    @property
    def has_levels(self) -> bool:
        return self.sites > 1 or self.world > self.total_hosts

    def site_of(self, host: int) -> int:
        return host // self.hosts

    def hosts_of(self, site: int) -> range:
        return range(site * self.hosts, (site + 1) * self.hosts)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number among the ranks of that host."""
        ranks = enumerate(self.ranks_by_host)
        return [(host, number) for host, count in ranks for number in range(count)][rank]

    def check_host(self, host: int) -> None:
        check_whole("host", host, 0, self.total_hosts - 1)

    def check_link(self, sender: int, receiver: int) -> None:
        self.check_host(sender)
        self.check_host(receiver)
        if sender == receiver:
            raise wrong("link", (sender, receiver), "two hosts that differ")

    def is_far(self, sender: int, receiver: int) -> bool:
        return self.site_of(sender) != self.site_of(receiver)

    def link_of(self, sender: int, receiver: int) -> Link:
        usual = self.wan if self.is_far(sender, receiver) else self.link
        return self.links.get((sender, receiver), usual)

    def port_of(self, host: int) -> Port:
        return self.ports.get(host, self.port)

    def others(self, host: int) -> list[int]:
        return [other for other in range(self.total_hosts) if other != host]

    def pairs(self) -> list[tuple[int, int]]:
        return list(permutations(range(self.total_hosts), 2))

    def with_parts(self, **changes: Any) -> Network:
        of_links, of_ports, parts = _split(changes)
        for name in parts:
            if name not in _names(Network):
                raise OptionError(f"neither a network nor its links or ports have a {name}")
        return replace(self, **parts).with_link(None, **of_links).with_port(None, **of_ports)

    def with_link(self, pair: tuple[int, int] | None, **changes: Any) -> Network:
        if pair is None:
            return replace(
                self, link=changed(self.link, **changes), links=self._links(False, changes)
            )
        self.check_link(*pair)
        return replace(self, links={**self.links, pair: changed(self.link_of(*pair), **changes)})

    def with_wan(self, **changes: Any) -> Network:
        of_links, of_ports, others = _split(changes)
        for name in others:
            known = ", ".join(sorted(LINK_FIELDS | PORT_FIELDS))
            raise OptionError(f"neither links nor gateways have a {name}; they have {known}")
        return replace(
            self,
            wan=changed(self.wan, **of_links),
            links=self._links(True, of_links),
            gateway=changed(self.gateway, **of_ports),
        )

    def _links(self, far: bool, changes: Mapping[str, Any]) -> dict[tuple[int, int], Link]:
        """The links that differ, those within sites changed, or those between them."""
        return {
            pair: changed(link, **changes) if self.is_far(*pair) == far else link
            for pair, link in self.links.items()
        }

    def with_port(self, host: int | None, **changes: Any) -> Network:
        if host is None:
            ports = {key: changed(port, **changes) for key, port in self.ports.items()}
            return replace(self, port=changed(self.port, **changes), ports=ports)
        self.check_host(host)
        return replace(self, ports={**self.ports, host: changed(self.port_of(host), **changes)})

    @property
    def all_links(self) -> tuple[Link, ...]:
        return (self.link, self.wan, *self.links.values())

    @property
    def all_ports(self) -> tuple[Port, ...]:
        return (self.port, self.gateway, *self.ports.values())

    @property
    def only_loses(self) -> bool:
        """True if loss is all that is asked for, of any link."""
        return all(link.only_loses for link in self.all_links) and all(
            port == Port() for port in self.all_ports
        )


def _names(kind: type) -> frozenset[str]:
    return frozenset(entry.name for entry in fields(kind))


QUEUE_FIELDS: Final = frozenset(QUEUES)
"""Of ports, when both links and ports could be meant: that is where rates usually are."""
LINK_FIELDS: Final = _names(Link) - QUEUE_FIELDS
PORT_FIELDS: Final = _names(Port)


def _split(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Changes of links, of ports, and of neither."""
    of_links = {name: value for name, value in changes.items() if name in LINK_FIELDS}
    of_ports = {name: value for name, value in changes.items() if name in PORT_FIELDS}
    return of_links, of_ports, {n: v for n, v in changes.items() if n not in of_links | of_ports}


def changed(part: Any, **changes: Any) -> Any:
    """A Link or Port with other values. A queue given one way, or a policer, replaces another."""
    known = _names(type(part))
    for name in changes:
        if name not in known:
            kind = type(part).__name__.lower()
            raise OptionError(f"a {kind} has no {name}; it has {', '.join(sorted(known))}")
    if any(changes.get(name) is not None for name in QUEUES):
        changes = {**dict.fromkeys(QUEUES), **changes}
    return replace(part, **changes)


def queue_bytes(rate_mbit: float, part: Link | Port, mtu: int) -> float:
    """Length of a queue in bytes of frames, or of a policer's bucket; two packets at least, or
    nothing would pass."""
    frame = float(mtu + ETHERNET_BYTES)
    if part.queue_packets is not None:
        return max(part.queue_packets, 2) * frame
    for ms in (part.queue_ms, part.policer_ms):
        if ms is not None:
            return max(ms * rate_mbit * 125, 2 * frame)
    return max(QUEUE_MS * rate_mbit * 125, QUEUE_PACKETS * frame)


# ---- as native/lab/links.h has it ----


def rate_fields(mbit: float | None, part: Link | Port, mtu: int) -> dict[str, float]:
    """Fields of a lab_rate; without a rate all are 0."""
    return {
        "bytes_per_s": (mbit or 0.0) * 125_000,
        "queue_bytes": queue_bytes(mbit, part, mtu) if mbit else 0.0,
        "polices": part.policer_ms is not None,
    }


def port_fields(port: Port, mtu: int) -> tuple[dict[str, float], dict[str, float]]:
    return rate_fields(port.up_mbit, port, mtu), rate_fields(port.down_mbit, port, mtu)


def link_fields(link: Link, mtu: int) -> dict[str, Any]:
    """Fields of a lab_link."""
    begin, go_on = link.chances
    return {
        "begin": begin,
        "go_on": go_on,
        "double_": link.duplicate,
        "reorder": link.reorder,
        "hold_ns": link.hold_ms * 1e6,
        "delay_ns": link.delay_ms * 1e6,
        "jitter_ns": link.jitter_ms * 1e6,
        "spread_ns": link.spread_ms * 1e6,
        "rate": rate_fields(link.rate_mbit, link, mtu),
    }

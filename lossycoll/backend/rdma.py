"""Ranks that reach each other by RDMA: found out as they meet, so that all of them know it alike.

Each rank that has a port opens a queue pair and says so; those that have one greet each other; and
two of them use it if each has heard the other. All else goes by UDP. docs/rdma.md has the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lossycoll.errors import EngineError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.options.texts import VERBS
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.payload import datagram_payload
from lossycoll.runtime.engine.verbs_port import VerbsAddress, VerbsPort, memory_limit
from lossycoll.runtime.net.interfaces import Interface
from lossycoll.runtime.net.rdma_ports import choose_port, ports
from lossycoll.runtime.world.rendezvous import Rendezvous

from .sharing import Offer, alike

GREETING_SECONDS: Final = 2.0
"""Time that ranks wait for each other's greetings; they have just met."""

LEAST_MTU: Final = 256
MOST_MTU: Final = 4096


@dataclass(frozen=True, slots=True)
class Rdma:
    """This rank's end. ``port``: None where it has none, for the reason ``why``, which is empty
    where nobody wants one. ``mtu``: the largest datagram that it sends."""

    port: VerbsPort | None = None
    chosen: str = ""
    why: str = ""
    mtu: int = 0

    def to_json(self) -> list[Any] | None:
        return None if self.port is None else [self.mtu, *self.port.address]

    def hand_over(self, host: Host, *, is_used: bool) -> None:
        """Gives the port to the host, or closes it if nobody is reached by it."""
        if self.port is not None and is_used:
            host.take_port(self.port)
        self.close()

    def close(self) -> None:
        """Idempotent; nothing where a host has taken the port."""
        if self.port is not None:
            self.port.close()


@dataclass(frozen=True, slots=True)
class Reach:
    """Ranks reached by RDMA."""

    addresses: Mapping[int, VerbsAddress] = field(default_factory=dict)  # Of those, by rank
    # Data bytes per packet that all of the links in use carry; None: no rank uses RDMA
    payload: int | None = None


def open_rdma(options: Options, interface: Interface) -> Rdma:
    """The port that this rank would use, with a queue pair: before the ranks meet."""
    if options.link == "udp" or VERBS in options.disabled:
        return Rdma()
    chosen, why = choose_port(options.verbs_device, options.verbs_gid, interface, ports())
    if chosen is None:
        return Rdma(why=why)
    one = chosen.port
    try:
        port = VerbsPort(
            one.device,
            one.number,
            chosen.gid.index,
            counters=one.counters,
            library=options.libibverbs,
        )
    except EngineError as error:
        if options.verbs_device:
            raise
        return Rdma(chosen=str(chosen), why=str(error))
    return Rdma(port, str(chosen), "", min(port.mtu, options.mtu or port.mtu))


def agree(
    where: Where, rendezvous: Rendezvous, mine: Rdma, hellos: Sequence[Mapping[str, Any]]
) -> Reach:
    """Finds out who reaches whom: all ranks call it at the same place of their rendezvous.

    There are two more rounds if two ranks have a port, and none otherwise.
    """
    said = [hello.get("rdma") for hello in hellos]
    having = [rank for rank, entry in enumerate(said) if entry is not None]
    # A rank of an older version goes through no more rounds than it knows; and one machine alone
    # has its memory.
    offers = [Offer.from_json(hello["offer"]) for hello in hellos if "offer" in hello]
    is_one_machine = len(offers) == len(hellos) and len(alike(offers)) == 1
    if not all("rdma" in hello for hello in hellos) or is_one_machine:
        return Reach()
    if len(having) < 2:
        _tell_none(where, mine)
        return Reach()
    sizes, addresses = _offers(where, said)
    size = min(sizes.values())
    others = {rank: one for rank, one in addresses.items() if rank != where.rank}
    if mine.port is not None:
        mine.port.know(where.rank, others)
    rendezvous.exchange("greet", None)  # all are about to
    heard: set[int] = set()
    if mine.port is not None:
        heard = mine.port.greet(int(rendezvous.session, 16), where.rank, size, GREETING_SECONDS)
    answers = [set(ranks) for ranks in rendezvous.exchange("heard", sorted(heard))]
    if mine.port is not None:
        mine.port.drop_arrived()
    pairs = {(a, b) for a in having for b in having if a in answers[b] and b in answers[a]}
    reached = {rank: addresses[rank] for rank in having if (where.rank, rank) in pairs}
    _tell(where, mine, size, having, reached)
    if not pairs:
        return Reach()
    complete = len(pairs) == where.world * (where.world - 1)
    by_udp = () if complete else [int(hello["payload"]) for hello in hellos]
    return Reach(reached, min([datagram_payload(size), *by_udp]))


def _offers(
    where: Where, said: Sequence[Sequence[Any] | None]
) -> tuple[dict[int, int], dict[int, VerbsAddress]]:
    """The largest datagram and the address of each rank that has a port."""
    sizes, addresses = {}, {}
    for rank, entry in enumerate(said):
        if entry is None:
            continue
        try:
            size, *rest = entry
            sizes[rank], addresses[rank] = int(size), VerbsAddress.from_json(rest)
            if not LEAST_MTU <= sizes[rank] <= MOST_MTU:
                raise ValueError(f"datagrams of {size} bytes")
        except ValueError as error:
            raise RendezvousError(
                f"{where}: what rank {rank} says of its port of RDMA makes no sense ({error}); do "
                f"all ranks run the same version?",
                peer=rank,
            ) from error
    return sizes, addresses


def _tell_none(where: Where, mine: Rdma) -> None:
    """Says why nobody is reached, where this machine has RDMA."""
    if mine.port is not None and where.world > 1:
        logfmt.event(logging.INFO, where, "rdma", port=mine.chosen, why="no other rank has a port")
    elif mine.why:
        log.warning("%s: packets go by UDP, since RDMA can't be used: %s", where, mine.why)


def _tell(
    where: Where,
    mine: Rdma,
    size: int,
    having: Sequence[int],
    reached: Mapping[int, VerbsAddress],
) -> None:
    """Logs who is reached by RDMA, and what isn't as it could be."""
    if mine.port is None:
        _tell_none(where, mine)
        return
    lost = [rank for rank in having if rank != where.rank and rank not in reached]
    logfmt.event(
        logging.INFO,
        where,
        "rdma",
        port=mine.chosen,
        mtu=size,
        queue=mine.port.queue,
        ranks=",".join(map(str, sorted(reached))) or "none",
        **({"udp": ",".join(map(str, lost))} if lost else {}),
    )
    if lost:
        log.warning(
            "%s: packets go to ranks %s by UDP, since no datagram of RDMA of %d bytes came through "
            "by %s; are both ports in one network, with one version of RoCE and one partition "
            "(this one's is %#x), and does it carry as many bytes (LOSSYCOLL_MTU)?",
            where,
            ", ".join(map(str, lost)),
            size,
            mine.chosen,
            mine.port.address.partition,
        )
    if mine.port.queue < mine.port.queue_wanted:
        log.warning(
            "%s: only %d of %d datagrams may wait at %s, since the memory that may be locked is "
            "%s; raise ulimit -l",
            where,
            mine.port.queue,
            mine.port.queue_wanted,
            mine.chosen,
            memory_limit(),
        )

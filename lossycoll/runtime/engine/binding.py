"""A group of the native engine from Python. Only this file and host.py know the engine's
library.

Buffers are addresses (ints) here: whoever submits keeps the memory alive until the ticket is done.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from lossycoll._native import ffi, lib
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, encode, faults
from lossycoll.plan.codec import number_of, phases

from .failures import Code, Failure, Where, error_of
from .gates import Wakers
from .host import Host, failure_of
from .link_events import LinkEvent
from .reports import Cause, EngineStats, LinkInfo, PeerStats, Report, Stream, data_of
from .users import Users

SLICE_SECONDS: Final = 0.1
"""Longest stay in C, so that Ctrl-C works."""
SLICE_NS: Final = int(SLICE_SECONDS * 1e9)

_SOUND: Final = Failure(0)


class DType(IntEnum):
    """lc_dtype: element types on the wire."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    BYTES = 4

    @property
    def itemsize(self) -> int:
        return (4, 8, 2, 2, 1)[self]


@dataclass(frozen=True, slots=True, eq=False)
class EngineCall:
    """An operation as C reads it (lc_call), but for its buffers: a plan and its parameters.

    It can be submitted any number of times. Equal to itself alone.
    """

    plan: Plan
    c: Any
    memory: tuple[object, ...]  # ``c`` points to it

    @classmethod
    def of(cls, plan: Plan) -> EngineCall:
        """A call that has what the plan says, and no parameters yet."""
        slots, edges = encode(plan)
        c = ffi.new("lc_call *")
        c.slots = ffi.cast("lc_slot_desc *", ffi.from_buffer(slots))
        c.edges = ffi.cast("lc_edge *", ffi.from_buffer(edges))
        c.n_slots = len(plan.slots)
        c.n_edges = len(edges) // ffi.sizeof("lc_edge")
        c.in_elements = plan.in_elements
        c.out_elements = plan.out_elements
        c.scratch_elements = plan.scratch_elements
        for i, level in enumerate(plan.all_levels):
            c.levels[i].elements_per_packet = level.elements_per_packet
            c.levels[i].plain = level.plain
        return cls(plan, c, (slots, edges))

    def given(
        self,
        *,
        dtype: DType,
        signature: int,
        timeout: float,
        delivery: Delivery,
        scale: float = 1.0,
        weights: Sequence[float] = (),
        divisor: float = 1.0,
        selective: bool = False,
        feedback: bool = False,
        needed: bytes = b"",
        encoding: str = "same",
        text: str = "",
        **flags: bool,
    ) -> EngineCall:
        """The same plan with parameters: those of lc_call (native/lossycoll_group.h), and ``flags``
        by their names there, such as ``waits``.

        ``timeout`` is in seconds. ``delivery`` is that of those levels of the plan that name none,
        as are ``selective`` (receivers may need single packets, which are resent until they come)
        and ``feedback`` (receivers tell senders what they have given up). ``encoding`` is a name of
        plan.codec's.
        """
        c = ffi.new("lc_call *", self.c[0])
        c.dtype = dtype
        c.encoding, c.gather_encoding = map(number_of, phases(encoding))
        for to, level in zip(c.levels, self.plan.all_levels, strict=False):
            to.selective = level.delivery is None and selective
            to.feedback = level.delivery is None and feedback
            how = level.delivery or delivery
            to.reliable, to.repair = how.reliable, how.repair
            to.code, to.most, to.max_missing = how.code.number, how.most_parity, how.max_missing
            to.choose = bool(how.most_parity) * lib.LC_CHOOSE_PARITY
            to.choose |= how.choose_rounds * lib.LC_CHOOSE_ROUNDS
        c.scale, c.divisor, c.signature = scale, divisor, signature
        c.timeout_ns = _ns(timeout)
        for flag, on in flags.items():
            setattr(c, flag, on)
        c.text = said = ffi.new("char[]", text.encode("utf-8", "replace"))
        memory: tuple[object, ...] = (*self.memory, said)
        if needed:
            c.needed = ffi.cast("uint8_t *", ffi.from_buffer(needed))
            c.n_needed = len(needed)
            memory += (needed,)
        if weights:
            c.weights = each = ffi.new("double[]", list(weights))
            memory += (each,)
        return EngineCall(self.plan, c, memory)


class Ticketed(Protocol):
    """Owner of the memory of an operation. ``ticket``: 0 as long as it is not the engine's."""

    ticket: int


class Completions:
    """Tickets, in the order in which their operations ended. Never freed: groups name it."""

    def __init__(self) -> None:
        self.handle: Final[Any] = lib.lc_completions_open()
        if self.handle == ffi.NULL:
            raise MemoryError
        self.owners: Final = itertools.count(1)
        """Numbers for groups: each is that of one alone."""

    def next(self) -> tuple[int, int]:
        """Waits for a ticket; returns it and its group's owner. The ticket is 0 where none came for
        a while, and negative when it is stopped."""
        owner = ffi.new("uint64_t *")
        ticket = lib.lc_completions_next(self.handle, _ns(SLICE_SECONDS), owner)
        return int(ticket), int(owner[0])

    def stop(self, stopped: bool) -> None:
        """Makes :meth:`next` return at once, or wait again."""
        lib.lc_completions_stop(self.handle, stopped)


_of_process: Final[dict[int, Completions]] = {}
"""Completions of each process: a forked child has its own."""


def completions() -> Completions:
    """This process's."""
    found = _of_process.get(os.getpid())
    return found or _of_process.setdefault(os.getpid(), Completions())


class EngineGroup:
    """Operations of one group at this rank, on the host of its process.

    Methods may be called from any thread. ``close`` first ends what is pending.
    Raises the errors of :func:`.failures.error_of`.

    ``number``: the group's on the wire: equal on all ranks, and of no other group of theirs. 1 to
    2**32 - 1. ``fault_group``: keys injected faults and random rounding; equal on all ranks.
    ``definition``: 64 bits, equal on ranks that mean the same group: part of every signature.
    ``members``: the host's processes, by rank; empty: those of the same numbers.
    """

    def __init__(
        self,
        host: Host,
        rank: int,
        world: int,
        *,
        number: int,
        fault_group: int,
        options: Options,
        members: Sequence[int] = (),
        met: bool = False,
        definition: int = 0,
        name: str = "",
    ) -> None:
        known = dict(enumerate(host.addresses))
        addresses = [known.get(process, "unknown") for process in members or range(world)]
        self._where = Where(rank, world, addresses=addresses)
        self._host = host
        self.number: Final = number
        self._ranks = {process: i for i, process in enumerate(members or range(world))}
        self._use = Users(self._where, self._free)
        self.completions: Final = completions()
        self.owner: Final = next(self.completions.owners)
        config = ffi.new("lc_group_config *")
        config.number = number
        config.rank = rank
        config.size = world
        if members:
            processes = ffi.new("uint16_t[]", list(members))
            config.members = processes
        config.fault_group = fault_group
        config.definition = definition
        config.deadline_min_ns = _ns(options.deadline_min)
        config.deadline_max_ns = _ns(options.deadline_max)
        config.link_ns = _ns(options.link_timeout)
        config.reorder_ns = _ns(options.reorder_min)
        config.met = met
        config.completions = self.completions.handle
        config.owner = self.owner
        config.name = text = ffi.new("char[]", name.encode("utf-8", "replace"))
        injected = faults.parse(options.inject)
        for fault in ("loss", "burst", "dup", "reorder", "seed"):
            setattr(config.inject, fault, getattr(injected, fault))
        if injected.links:
            shares = ffi.new("double[]", [injected.loss_of(peer, rank) for peer in range(world)])
            config.inject_loss = shares
        failure = ffi.new("lc_failure *")
        self._handle = lib.lc_group_open(host.handle, config, failure)
        del text  # read by now
        if self._handle == ffi.NULL:
            raise error_of(failure_of(failure), self._where)
        host.hold()

    def is_interrupted(self) -> bool:
        """True if a call of this very thread waits here, of which a signal's handler asks."""
        return self._use.has_me()

    def close(self) -> None:
        """Ends what is pending (it fails as CLOSED) and frees the group; in a signal's handler that
        has interrupted one of its calls, when that returns. A forked child leaves all as it is."""
        self._use.close(lambda: lib.lc_group_abort(self._handle, Code.CLOSED, -1))

    def _free(self) -> None:
        lib.lc_group_close(self._handle)
        self._host.release()

    def submit(
        self,
        call: EngineCall,
        input: int,
        output: int,
        owner: Ticketed | None = None,
        gate: int = 0,
        seq: int = -1,
    ) -> int:
        """Hands over an operation with the addresses of its buffers; returns its ticket.

        ``owner.ticket`` is set to it as well, also where a signal's handler raises in between: from
        then on the engine writes to the buffers. ``gate``: address of what holds it back, or 0.
        ``seq``: number of the call that it serves; -1: none.
        """
        own = ffi.new("lc_call_case *", (input, output, gate, seq))
        try:
            with self._use:
                ticket = int(lib.lc_group_submit_case(self._handle, call.c, own))
        finally:
            if owner is not None:
                owner.ticket = own.ticket
        if ticket < 0:
            raise error_of(Failure(ticket), self._where)
        return ticket

    def post(
        self, owner: Ticketed, address: int, timeout: float, *, zero: bool = False, **fields: int
    ) -> int:
        """Posts a send or a receive; returns its ticket, and sets ``owner.ticket`` as
        :meth:`submit` does. 0: a small message is on its way, and its memory may change.

        ``address``: of the elements, or of room for them. ``zero``: a lossy receive has zeros where
        packets are missing, else what it had before. ``fields``: the others of lc_message
        (native/lossycoll_group.h), by their names.
        """
        c = ffi.new("lc_message *", fields)
        c.data = ffi.cast("void *", address)
        c.timeout_ns = _ns(timeout)
        c.missing = lib.LC_MISSING_ZERO if zero else lib.LC_MISSING_KEEP
        try:
            with self._use:
                ticket = int(lib.lc_group_post(self._handle, c))
        finally:
            owner.ticket = max(0, c.ticket)
        if ticket < 0:
            raise error_of(Failure(ticket), self._where)
        return ticket

    @property
    def address(self) -> int:
        """Address of the engine's group, for code that takes its host's turns."""
        return int(ffi.cast("uintptr_t", self._handle))

    @property
    def wakers(self) -> Wakers:
        return self._host.wakers

    def source(self, ticket: int) -> int:
        """The rank that a finished receive was served by, or -1."""
        with self._use:
            return int(lib.lc_group_source(self._handle, ticket))

    def unheard(self) -> int:
        """Number of messages that count as sent and may not have reached their receivers yet."""
        with self._use:
            return int(lib.lc_group_unheard(self._handle))

    def peer_left(self, peer: int) -> None:
        """``peer`` has left in order: of its messages only what came before can be received,
        and what lingers is not owed to it."""
        with self._use:
            lib.lc_group_peer_left(self._handle, peer)

    def wait(self, ticket: int, seconds: float) -> int:
        """The operation's code, or Code.PENDING after ``seconds`` (at most SLICE_SECONDS)."""
        ns = SLICE_NS if seconds >= SLICE_SECONDS else _ns(seconds)
        with self._use:
            return int(lib.lc_group_wait(self._handle, ticket, ns))

    def wait_result(self, ticket: int, seconds: float) -> int:
        """Waits like :meth:`wait`, but until the result is there (Code.OK), whatever becomes of the
        operation later. The buffers may be read then, and not be written before it is done."""
        slice_ns = _ns(min(seconds, SLICE_SECONDS))
        with self._use:
            return int(lib.lc_group_wait_result(self._handle, ticket, slice_ns))

    def outcome(self, ticket: int) -> tuple[int, int]:
        """The code of a finished operation, and how many packets it left as they were."""
        report, failure = ffi.new("lc_report *"), ffi.new("lc_failure *")
        with self._use:
            code = lib.lc_group_result(self._handle, ticket, report, failure)
        return code, report.kept

    def result(self, ticket: int) -> tuple[Report, Failure]:
        """Report of a finished operation, and its failure (code 0: none)."""
        report, failure = ffi.new("lc_report *"), ffi.new("lc_failure *")
        with self._use:
            code = lib.lc_group_result(self._handle, ticket, report, failure)
        found = failure_of(failure) if failure.code else _SOUND
        if code < 0 and found.code >= 0:
            found = Failure(code)
        return data_of(Report, report), found

    def failure(self) -> Failure:
        """Why the group takes no operation any more (code 0: it does)."""
        return failure_of(self._told("lc_failure *", lib.lc_group_failure))

    def arrived(self, ticket: int, slot: int, peer: int, n_packets: int) -> NDArray[np.bool_]:
        """Mask of a stream's packets that arrived, by its slot number here, of an operation that is
        finished or has its result.

        Shape (n_packets,). Raises ValueError for a stream that there isn't, or of another length.
        """
        return self._packets(lib.lc_group_arrived, ticket, slot, peer, n_packets)

    def given_up(self, ticket: int, slot: int, peer: int, n_packets: int) -> NDArray[np.bool_]:
        """Mask of a stream's packets that ``peer`` has given up, by its slot number there, of a
        finished operation with feedback. Otherwise as :meth:`arrived`."""
        return self._packets(lib.lc_group_given_up, ticket, slot, peer, n_packets)

    def streams(self, ticket: int) -> tuple[Stream, ...]:
        """The streams of a finished operation that came here, in the plan's order."""
        with self._use:
            n = lib.lc_group_streams(self._handle, ticket, ffi.NULL, 0)
            table = ffi.new("lc_stream[]", max(0, n))
            lib.lc_group_streams(self._handle, ticket, table, max(0, n))
        found = (data_of(Stream, entry) for entry in table)
        # The engine sets a cause when a stream ends, which none does in an operation that failed.
        return tuple(one if one.settled_ns else replace(one, cause=Cause.FAILED) for one in found)

    def _packets(
        self, ask: Any, ticket: int, slot: int, peer: int, n_packets: int
    ) -> NDArray[np.bool_]:
        found = np.empty(n_packets, np.uint8)
        buffer = ffi.from_buffer("uint8_t *", found)
        with self._use:
            code = ask(self._handle, ticket, slot, peer, buffer, n_packets)
        if code != Code.OK:
            raise ValueError(
                f"{self._where}: slot {slot} has no stream of {n_packets} packets with rank {peer}"
            )
        return found.astype(np.bool_)

    def release(self, ticket: int) -> None:
        with self._use:
            lib.lc_group_release(self._handle, ticket)

    def lingering(self) -> tuple[int, int]:
        """Number of operations done here whose packets some rank may still need, and the number
        of the first of them."""
        oldest = ffi.new("uint32_t *")
        with self._use:
            n = lib.lc_group_lingering(self._handle, oldest)
        return int(n), int(oldest[0])

    def notify(self, ticket: int) -> None:
        """``completions`` will name the ticket, once; it was submitted without."""
        with self._use:
            lib.lc_group_notify(self._handle, ticket)

    def abort(self, code: Code, peer: int = -1) -> None:
        """Fails everything that is pending or comes later."""
        with self._use:
            lib.lc_group_abort(self._handle, code, peer)

    def peer_dead(self, peer: int) -> None:
        """From now on ``peer`` is lost altogether, for good: nothing waits for it."""
        with self._use:
            lib.lc_group_peer_dead(self._handle, peer)

    def stats(self) -> EngineStats:
        return data_of(EngineStats, self._told("lc_stats *", lib.lc_group_stats))

    def peer_stats(self, peer: int) -> PeerStats:
        c = self._told("lc_peer_stats *", lib.lc_group_peer_stats, peer)
        return data_of(PeerStats, c, rank=peer, address=self._where.addresses[peer])

    def last_report(self) -> Report:
        """The operation that ended last; zeros before the first."""
        return data_of(Report, self._told("lc_report *", lib.lc_group_last_report))

    def _told(self, kind: str, tell: Any, *of: int) -> Any:
        """A struct that the engine fills."""
        c = ffi.new(kind)
        with self._use:
            tell(self._handle, *of, c)
        return c

    def event(self) -> LinkEvent | None:
        """The oldest event of the host's link that nobody has taken, if there is one."""
        with self._use:
            found = self._host.event()
        if found is None or found.peer < 0:
            return found
        return replace(found, peer=self._ranks.get(found.peer, -1))

    def claim(self, what: str) -> bool:
        """As of :meth:`lossycoll.runtime.engine.host.Host.claim`."""
        return self._host.claim(what)

    def link(self) -> LinkInfo:
        """Facts of the host's socket; its payload is one that all links to members carry."""
        with self._use:
            return self._host.link_to(list(self._ranks))


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))

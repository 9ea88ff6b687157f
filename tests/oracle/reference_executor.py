"""The reference executor: what the result of a collective *is*, given which packets were lost.

All ranks' plans run in one process, without sockets or time, on numpy arrays. The native engine
must give the same elements, to rounding, for every plan and every set of lost packets.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.codec import phases
from lossycoll.plan.model import Combine, Finish, Missing, Own, Plan, Slot, Target, packet_count
from lossycoll.plan.rng import key_of
from lossycoll.plan.sets import NO_PARITY, Code
from tests.oracle.codec import Array, Codec, WireType, codec_of, wire_type

from .reference_delivery import Chosen, Delivery, Lost, Needed


@dataclass
class RankResult:
    """One rank's outcome. The counters are those of the native engine's report, by name."""

    output: Array
    """The rank's output buffer: the array that was passed in."""
    missing: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict)
    """(slot number here, sender) -> packets of that stream that never arrived, ascending.

    Lost packets, and those that the sender had nothing to put into. Every stream has an entry.
    """
    counts: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Slot number -> contributions in each of its packets, for slots that finish a mean."""
    contribution_packets: int = 0
    """Packets finished by a mean; the next two describe them."""
    contributions: int = 0
    contributions_min: int = 0
    own_filled: int = 0
    """Packets that never arrived and became own * scale."""
    kept: int = 0
    """Packets that never arrived and left the output as it was."""
    zero_filled: int = 0
    """Packets that never arrived and became zero."""
    alone: int = 0
    """Stratified packets to which no other rank contributed."""

    @property
    def packets_missing(self) -> int:
        return sum(len(packets) for packets in self.missing.values())


@dataclass
class _Value:
    """What a slot holds at the end: elements as sent on, and contributions per packet (0: none)."""

    elements: Array
    count: NDArray[np.int64]
    divisor: NDArray[np.float64] | None = None
    """Per packet: what a partial sum has been divided by in memory. None: by nothing."""


_Key = tuple[int, int]  # rank, slot number

ROUNDING: Final = 0x726F756E64
"""Keeps what is drawn to round elements apart from injected faults ("round")."""


def execute(
    plans: Sequence[Plan],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    dtype: str,
    scale: float,
    lost: Lost,
    rounds: int | None,
    *,
    weights: NDArray[np.float64] | None = None,
    divisor: float | None = None,
    needed: Needed | None = None,
    code: Code = NO_PARITY,
    chosen: Chosen | None = None,
    encoding: str = "same",
    name: tuple[int, int] = (0, 0),
    keeps_sums: bool = False,
    deterministic: bool = False,
) -> list[RankResult]:
    """Runs one collective on all ranks; docs/plans.md has the rules of missing packets.

    Long because its many arguments are said here.

    Sums are taken in float32 (f64: float64), the own contribution first, then the sources in the
    plan's order. They are rounded to the wire type whenever they are stored or sent on. Own
    data and sums that are sent are encoded; who stores them as well, stores what the others decode.
    What has come encoded is sent on as it came.

    Args:
        plans: By rank, as ``inputs`` and ``outputs``.
        inputs: ``in_elements`` elements each, one-dimensional, of the wire type.
        outputs: ``out_elements`` elements each, written in place; may be the inputs.
        dtype: "f32", "f64", "f16", "bf16" (as uint16 bit patterns) or "bytes" (as uint8).
        scale: Multiplies means: the world for a sum, 1 for a mean.
        lost: Says which packets of a stream are lost in a round, those of parity after the others.
        rounds: Of repair; each resends what those before lost. None: reliable, nothing is missing.
        weights: Shape (receiver, sender), multiplies what is added at a receiver; None: 1.
        divisor: What a WEIGHTED finish divides by; None: the world. 0: the weights of what came,
            and of the own contribution, which is multiplied by its own.
        needed: Says which packets of a stream are resent until they come.
        code: Of parity; fitted to each stream.
        chosen: What each stream has instead of ``code`` and ``rounds``, by what its path loses.
        encoding: How packets carry elements, a name of plan.codec's.
        name: (group, operation), for what is drawn to round elements at random.
        keeps_sums: Sums that are sent encoded stay as they were where they were added up.
        deterministic: All contributions are added in the order of ranks, the own one among them.

    Returns:
        What happened at each rank.

    Raises:
        ValueError: For plans or buffers that don't fit, or an operation that the type lacks.
    """
    _check_buffers(plans, inputs, outputs, wire_type(dtype))
    slots, streams = _joined(plans)
    codecs = tuple(codec_of(one, dtype) for one in phases(encoding))
    sums = (scale, weights, divisor, keeps_sums, deterministic)
    ranks = _ranks(plans, inputs, outputs, codecs, name, *sums)
    delivery = Delivery(lost, rounds, needed, code, chosen)
    values: dict[_Key, _Value] = {}
    for rank, number in _sorted(slots):
        slot = slots[rank, number]
        arrived = []
        how = delivery.of(plans[rank].all_levels[slot.level])
        for sender in slot.sources:
            sent = values[sender, streams[rank, number, sender]]
            here = how.arrived((sender, rank, number), sent.count > 0)
            ranks[rank].result.missing[number, sender] = np.flatnonzero(~here)
            arrived.append(_Value(sent.elements, np.where(here, sent.count, 0), sent.divisor))
        values[rank, number] = ranks[rank].run(slot, arrived, values.get((rank, slot.feed)))
    return [rank.result for rank in ranks]


@dataclass(frozen=True)
class _Rank:
    """What the slots of one rank have in common."""

    plan: Plan
    came_with: Array
    result: RankResult
    codecs: tuple[Codec, ...]
    name: tuple[int, int]
    scale: float
    weights: NDArray[np.float64]
    divisor: float
    keeps_sums: bool
    deterministic: bool

    @property
    def codec(self) -> Codec:
        """Of contributions."""
        return self.codecs[0]

    @property
    def kind(self) -> WireType:
        return self.codec.kind

    def run(self, slot: Slot, arrived: list[_Value], fed: _Value | None) -> _Value:
        """Combines, finishes and stores one slot; returns what it sends on and feeds to others.

        ``fed``: the result of the slot that feeds it, if one does.
        """
        own = self._own(slot, fed)
        if slot.combine == Combine.ADD:
            value = self._sum(slot, own, arrived)
        else:
            value = arrived[0] if arrived else own
        keeps = slot.number in self._feeders and slot.target == Target.OUT
        travels, kept = slot.dests or keeps, value
        if travels and not (slot.combine == Combine.COPY and arrived):
            value = self._encoded(slot, value)
        if slot.target == Target.OUT:
            self._store(slot, kept if self.keeps_sums else value)
        return value

    def _encoded(self, slot: Slot, value: _Value) -> _Value:
        """What becomes of it on the way, packet by packet."""
        if self.codec.same or self.plan.all_levels[slot.level].plain:
            return value
        step = self._step(slot)
        by = self._spread(self._divisor(slot, value.count), slot).astype(value.elements.dtype)
        elements = value.elements / by
        came, first, codec = [], self._rounding_seed(slot), self.codecs[self._sends_results(slot)]
        for at in range(0, len(elements), step):
            packet = elements[at : at + step]
            came.append(codec.decode(codec.encode(packet, first + at), len(packet)))
        return _Value(np.concatenate(came) * by, value.count)

    def _sends_results(self, slot: Slot) -> bool:
        """Whether what the slot sends is finished: a mean, or what has come of one."""
        slot = self._origin(slot)
        if slot.combine == Combine.ADD:
            return slot.finish != Finish.NONE
        return bool(slot.sources)

    def _origin(self, slot: Slot) -> Slot:
        """The slot whose result a copy sends on, or that slot itself."""
        while slot.combine == Combine.COPY and slot.own == Own.SLOT:
            slot = self._slots[slot.feed]
        return slot

    def _rounding_seed(self, slot: Slot) -> int:
        """Of the first packet; the lower half counts elements. Slots that send the same part of the
        input, in packets of several sizes perhaps, round it alike."""
        is_input = slot.combine == Combine.COPY and slot.own == Own.INPUT
        of_slot = 0 if is_input else slot.number + 1
        key = key_of(ROUNDING, *self.name, self.plan.rank, of_slot)
        return (key >> 32 << 32) + (slot.own_offset if is_input else 0)

    def _divisor(self, slot: Slot, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """What a packet's elements are divided by where they are float16."""
        slot = self._origin(slot)
        partial = slot.combine == Combine.ADD and slot.finish == Finish.NONE
        return self.codec.divisor(count) if partial else np.ones(len(count))

    def _step(self, slot: Slot) -> int:
        return self.plan.all_levels[slot.level].elements_per_packet

    def _own(self, slot: Slot, fed: _Value | None) -> _Value:
        """The own contribution; without any, elements of no weight."""
        n_packets = packet_count(slot.length, self._step(slot))
        part = slice(slot.own_offset, slot.own_offset + slot.length)
        if fed is not None and slot.own == Own.SLOT:
            there = self.plan.all_levels[self._slots[slot.feed].level].elements_per_packet
            at = (slot.own_offset + np.arange(n_packets) * self._step(slot)) // there
            divisor = None if fed.divisor is None else fed.divisor[at]
            return _Value(fed.elements[part], fed.count[at], divisor)
        if slot.own == Own.INPUT:
            return _Value(self.came_with[part], np.ones(n_packets, dtype=np.int64))
        if not slot.sources:
            raise ValueError(f"slot {slot.number} has no sources, wanted own data in it")
        nothing = np.zeros(slot.length, self.kind.wire)
        return _Value(nothing, np.zeros(n_packets, dtype=np.int64))

    @cached_property
    def _feeders(self) -> frozenset[int]:
        return frozenset(slot.feed for slot in self.plan.slots if slot.own == Own.SLOT)

    @cached_property
    def _slots(self) -> dict[int, Slot]:
        return {slot.number: slot for slot in self.plan.slots}

    def _sum(self, slot: Slot, own: _Value, arrived: list[_Value]) -> _Value:
        """Adds what arrived and finishes it. Factors are per packet, in the type of the sum."""
        kind, scale = self.kind, self.scale
        if kind.acc is None:
            raise ValueError(f"dtype is {kind.name}, which can't be added: wanted a floating type")
        stratified = slot.finish == Finish.STRATIFIED
        if stratified and slot.own == Own.NONE:
            raise ValueError(f"slot {slot.number} is stratified, wanted own data in it")
        mine = self._widened(own, slot)
        count = own.count.copy()
        others = np.zeros_like(count)
        by_weights = slot.finish == Finish.WEIGHTED and not self.divisor
        own_weight = self.weights[self.plan.rank] if by_weights else 1.0
        divisor = np.where(own.count > 0, own_weight, 0.0)
        addends = []
        if not stratified:
            part = mine * kind.acc.type(own_weight)
            addends.append((self.plan.rank, part, self._spread(own.count > 0, slot)))
        for sender, value in zip(slot.sources, arrived, strict=True):
            here = self._spread(value.count > 0, slot)
            part = self._widened(value, slot) * kind.acc.type(self.weights[sender])
            addends.append((sender, part, here))
            count += value.count
            others += value.count > 0
            divisor += np.where(value.count > 0, self.weights[sender], 0.0)
        if self.deterministic:
            addends.sort(key=lambda addend: addend[0])
        total = _added(addends, np.zeros(slot.length, dtype=kind.acc))
        if slot.finish == Finish.MEAN:
            total *= self._spread(_ratio(scale, count), slot).astype(kind.acc)
        elif by_weights:
            total *= self._spread(_ratio(scale, divisor), slot).astype(kind.acc)
        elif slot.finish == Finish.WEIGHTED:
            total *= kind.acc.type(scale / self.divisor)
        elif stratified:
            sources = len(slot.sources)
            full = slot.full_weight or sources + 1
            self.result.alone += int(np.count_nonzero(others == 0))
            total *= self._spread(_ratio(scale * sources, full * others), slot).astype(kind.acc)
            own_factor = np.where(others > 0, scale / full, _ratio(scale, own.count))
            total += mine * self._spread(own_factor, slot).astype(kind.acc)
        if slot.finish != Finish.NONE:
            _note(self.result, slot.number, count)
        elif self.codec.same and self.codec.divides:
            divisor = self.codec.divisor(count)
            total /= self._spread(divisor, slot).astype(kind.acc)
            return _Value(kind.narrow(total), count, divisor)
        return _Value(kind.narrow(total), count)

    def _widened(self, value: _Value, slot: Slot) -> Array:
        """As sums hold them."""
        wide = self.kind.widen(value.elements)
        if value.divisor is not None:
            wide *= self._spread(value.divisor, slot).astype(wide.dtype)
        return wide

    def _store(self, slot: Slot, value: _Value) -> None:
        """Writes what there is to the output, and what is missing as the slot asks."""
        out = self.result.output[slot.offset : slot.offset + slot.length]
        there = self._spread(value.count > 0, slot)
        gone = int(np.count_nonzero(value.count == 0))
        if slot.missing == Missing.OWN:
            if gone and self.kind.acc is None:
                raise ValueError(f"dtype is {self.kind.name}, which can't be scaled: wanted KEEP")
            self.result.own_filled += gone
            if gone:
                wide = self.kind.widen(out[~there])
                out[~there] = self.kind.narrow(wide * wide.dtype.type(self.scale))
        elif slot.missing == Missing.ZERO:
            self.result.zero_filled += gone
            out[~there] = 0
        else:
            self.result.kept += gone
        np.copyto(out, value.elements, where=there)

    def _spread(self, per_packet: Array, slot: Slot) -> Array:
        """One value per packet -> one per element."""
        return np.repeat(per_packet, self._step(slot))[: slot.length]


def _ranks(
    plans: Sequence[Plan],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    codecs: tuple[Codec, ...],
    name: tuple[int, int],
    scale: float,
    weights: NDArray[np.float64] | None,
    divisor: float | None,
    keeps_sums: bool,
    deterministic: bool,
) -> list[_Rank]:
    if weights is None:
        weights = np.ones((len(plans), len(plans)))
    by = len(plans) if divisor is None else divisor
    # What a rank contributes is what it came with, whatever an in-place collective writes.
    came_with = [np.array(array, copy=True) for array in inputs]
    return [
        _Rank(
            plan,
            came_with[r],
            RankResult(outputs[r]),
            codecs,
            name,
            scale,
            weights[r],
            by,
            keeps_sums,
            deterministic,
        )
        for r, plan in enumerate(plans)
    ]


def _added(addends: Sequence[tuple[int, Array, Array]], total: Array) -> Array:
    """The sum of (rank, elements, where they are), in this order; zeros where there are none."""
    begun = np.zeros(len(total), dtype=np.bool_)
    for _, part, here in addends:
        np.copyto(total, np.where(begun, total + part, part), where=here)
        begun |= here
    return total


def _ratio(scale: float, count: NDArray[Any]) -> NDArray[np.float64]:
    """scale / count, and 0 where nothing was counted (nothing is finished there either)."""
    found: NDArray[np.float64] = np.zeros(len(count))
    np.divide(scale, count, out=found, where=count > 0)
    return found


def _note(result: RankResult, number: int, count: NDArray[np.int64]) -> None:
    """Adds a finished slot's contributions to the rank's counters."""
    result.counts[number] = count
    finished = count[count > 0]
    if len(finished):
        least = int(finished.min())
        if result.contribution_packets:
            least = min(least, result.contributions_min)
        result.contributions_min = least
        result.contribution_packets += len(finished)
        result.contributions += int(finished.sum())


def _check_buffers(
    plans: Sequence[Plan], inputs: Sequence[Array], outputs: Sequence[Array], kind: WireType
) -> None:
    if not len(plans) == len(inputs) == len(outputs):
        raise ValueError(
            f"{len(plans)} plans, {len(inputs)} inputs, {len(outputs)} outputs: wanted one of each "
            f"per rank"
        )
    for rank, plan in enumerate(plans):
        if (plan.rank, plan.world) != (rank, len(plans)):
            raise ValueError(
                f"plan {rank} is of rank {plan.rank} of {plan.world}, wanted {rank} of {len(plans)}"
            )
        if (plan.signature, plan.all_levels) != (plans[0].signature, plans[0].all_levels):
            raise ValueError(f"rank {rank} means another collective than rank 0: signatures differ")
        for name, array, elements in (
            ("input", inputs[rank], plan.in_elements),
            ("output", outputs[rank], plan.out_elements),
        ):
            if array.shape != (elements,) or array.dtype != kind.wire:
                raise ValueError(
                    f"{name} of rank {rank} is {array.dtype}{array.shape}, wanted "
                    f"{kind.wire}({elements},)"
                )


def _joined(
    plans: Sequence[Plan],
) -> tuple[dict[_Key, Slot], dict[tuple[int, int, int], int]]:
    """All slots, and (receiver, its slot, sender) -> the sender's slot.

    Every stream must have both its ends.
    """
    slots = {(plan.rank, slot.number): slot for plan in plans for slot in plan.slots}
    if len(slots) != sum(len(plan.slots) for plan in plans):
        raise ValueError("a plan has two slots of one number, wanted each number once")
    streams: dict[tuple[int, int, int], int] = {}
    for plan in plans:
        _check_feeds(plan)
    for plan in plans:
        for slot in plan.slots:
            for edge in slot.dests:
                at = slots.get((edge.peer, edge.slot))
                stream = f"the stream from rank {plan.rank} to slot {edge.slot} of {edge.peer}"
                if at is None or plan.rank not in at.sources:
                    raise ValueError(f"{stream} has no receiver, wanted a slot that expects it")
                if at.length != slot.length:
                    raise ValueError(
                        f"{stream} has {slot.length} elements, wanted the receiver's {at.length}"
                    )
                if at.level != slot.level:
                    raise ValueError(
                        f"{stream} is of level {slot.level}, wanted the receiver's {at.level}"
                    )
                if (edge.peer, edge.slot, plan.rank) in streams:
                    raise ValueError(f"{stream} has two senders, wanted one")
                streams[edge.peer, edge.slot, plan.rank] = slot.number
    for (rank, number), slot in slots.items():
        for sender in slot.sources:
            if (rank, number, sender) not in streams:
                raise ValueError(
                    f"slot {number} of rank {rank} waits for rank {sender}, wanted a slot there "
                    f"that sends to it"
                )
    return slots, streams


def _check_feeds(plan: Plan) -> None:
    before: dict[int, Slot] = {}
    for slot in plan.slots:
        if slot.own == Own.SLOT:
            _check_feed(plan, slot, before.get(slot.feed))
        before[slot.number] = slot


def _check_feed(plan: Plan, slot: Slot, feeder: Slot | None) -> None:
    name = f"slot {slot.number} of rank {plan.rank}, fed by slot {slot.feed},"
    if feeder is None or not (feeder.sources or feeder.own == Own.SLOT):
        raise ValueError(f"{name} wanted one that stands before it and waits for something")
    if slot.own_offset + slot.length > feeder.length:
        raise ValueError(f"{name} wanted no more than its {feeder.length} elements")
    each, there = (plan.all_levels[at.level].elements_per_packet for at in (slot, feeder))
    if there % each or slot.own_offset % each:
        raise ValueError(f"{name} has packets of {each}, wanted none that one of {there} cuts")
    sends = slot.target == Target.NONE and not slot.sources
    if sends != (slot.combine == Combine.COPY):
        raise ValueError(f"{name} wanted a sum, or a copy that is stored nowhere")


def _sorted(slots: Mapping[_Key, Slot]) -> list[_Key]:
    """All slots, each after those that it waits for (Kahn, CACM 5 (1962))."""
    waits = {key: len(slot.sources) + (slot.own == Own.SLOT) for key, slot in slots.items()}
    fed: dict[_Key, list[_Key]] = defaultdict(list)
    for (rank, number), slot in slots.items():
        if slot.own == Own.SLOT:
            fed[rank, slot.feed].append((rank, number))
    ready = deque(key for key, n in waits.items() if n == 0)
    done: list[_Key] = []
    while ready:
        key = ready.popleft()
        done.append(key)
        for then in [*((edge.peer, edge.slot) for edge in slots[key].dests), *fed[key]]:
            waits[then] -= 1
            if waits[then] == 0:
                ready.append(then)
    if len(done) != len(slots):
        stuck = sorted(key for key, n in waits.items() if n > 0)
        raise ValueError(f"these (rank, slot) wait for each other: {stuck}; wanted no cycle")
    return done

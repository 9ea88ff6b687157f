"""Collectives among replicas in one process, on any device: plans, losses and parity are the
engine's own functions of names, and so are the results, to the bit (of deterministic calls).

Whole tensors on the device are added; masks of packets are made on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lossycoll.plan import (
    Combine,
    Finish,
    Plan,
    Slot,
    Target,
    copies,
    draw_order,
    finer_elements,
    hierarchical,
    owner_count,
    packet_count,
    reduce_scatter,
)
from lossycoll.plan.faults import Inject
from lossycoll.plan.sets import NO_PARITY, Code
from tests.oracle.masks import lost
from tests.oracle.parity import shape_of
from tests.oracle.reference_delivery import Delivery

GROUP: Final = 1
FLOAT_BYTES: Final = 4

Mask = NDArray[np.bool_]


@dataclass
class Traffic:
    """Packets of data, those of them that never arrived, and what was sent besides."""

    packets: int = 0
    missing: int = 0
    parity: int = 0


class Exchange:
    """The collectives of one group, numbered as the engine numbers them.

    ``code`` gives the parity of a stream by its number of packets. ``rounds`` are of resending;
    None: nothing is lost. ``stream_packets`` and ``finer_packets`` are the options'.
    """

    def __init__(
        self,
        world: int,
        inject: Inject,
        payload: int,
        *,
        code: Callable[[int], Code] = lambda packets: NO_PARITY,
        rounds: int | None = 0,
        stream_packets: int = 0,
        finer_packets: int = 1,
        order_seed: int = 0,
        group: int = GROUP,
    ) -> None:
        self.world, self._whole = world, payload // FLOAT_BYTES
        self.per_packet = self._whole
        """Elements of a packet of the present call."""
        self.inject, self._code, self._rounds = inject, code, rounds
        self._stream_packets, self._finer = stream_packets, finer_packets
        self._seed, self._group = order_seed, group
        self.op = 0
        self.traffic = Traffic()

    def all_reduce(self, buffers: Sequence[Tensor]) -> None:
        """The mean on all ranks, in place, each float32 (n,); owners are drawn."""
        elements = len(buffers[0])
        order = draw_order(self._seed, self._group, self.op, self.world)
        order = order[: self.owners(elements)]
        self.per_packet = self.size_for(-(-elements // len(order)))
        plans = [
            hierarchical.all_reduce(self.world, rank, elements, self.per_packet, order=order)
            for rank in range(self.world)
        ]
        self._run(plans, buffers, buffers)

    def reduce_scatter(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Each rank's chunk of the mean, float32: of all chunks in a row, and its own."""
        counts = [len(output) for output in outputs]
        self.per_packet = self.size_for(max(counts))
        plans = [
            reduce_scatter.reduce_scatter(self.world, rank, counts, self.per_packet)
            for rank in range(self.world)
        ]
        self._run(plans, inputs, outputs)

    def all_gather(
        self, buffers: Sequence[Tensor], counts: Sequence[int], *, finer: bool = False
    ) -> None:
        """Each rank's chunk, of so many elements, goes to all, in place; what is lost stays.
        ``finer``: packets of short streams are smaller."""
        self.per_packet = self.size_for(max(counts), FLOAT_BYTES) if finer else self._whole
        plans = [
            copies.all_gather(self.world, rank, counts, self.per_packet)
            for rank in range(self.world)
        ]
        own = [torch.split(each, list(counts))[rank] for rank, each in enumerate(buffers)]
        self._run(plans, own, buffers)

    def owners(self, elements: int) -> int:
        """Number of ranks that own a bucket of so many elements."""
        return owner_count(self.world, packet_count(elements, self._whole), self._stream_packets)

    def size_for(self, longest: int, unit: int = 1) -> int:
        """Elements of a packet of a call whose longest stream has so many elements, each of
        ``unit`` of what the engine counts."""
        packets = packet_count(longest, self._whole)
        whole = self._whole * unit
        return finer_elements(whole, packets, self._stream_packets, self._finer) // unit

    def _run(
        self, plans: Sequence[Plan], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Sums first: a part of a buffer is added up before anything is copied over it."""
        losses = partial(lost, self.inject, self._group, self.op)
        self.op += 1
        delivery = Delivery(losses, self._rounds, None, NO_PARITY, self._chosen)
        sent: dict[tuple[int, int, int], Tensor] = {}
        ordered = [(plan.rank, slot) for plan in plans for slot in plan.slots]
        ordered.sort(key=lambda each: (bool(each[1].sources), each[1].combine == Combine.COPY))
        for rank, slot in ordered:
            came = {sender: self._came(delivery, sender, rank, slot) for sender in slot.sources}
            out = outputs[rank][slot.offset : slot.offset + slot.length]
            own = inputs[rank][slot.own_offset : slot.own_offset + slot.length]
            if slot.combine == Combine.ADD:
                parts = {s: sent[s, rank, slot.number] for s in slot.sources}
                out.copy_(self._sum(rank, slot, own, parts, came))
                value = out
            elif slot.sources:
                (sender,) = slot.sources
                there = self._spread(came[sender], slot, out.device)
                torch.where(there, sent[sender, rank, slot.number], out, out=out)
                value = out
            else:
                value = own
                if slot.target == Target.OUT:
                    out.copy_(own)
            for dest in slot.dests:
                sent[rank, dest.peer, dest.slot] = value

    def _chosen(self, sender: int, receiver: int, slot: int) -> tuple[Code, int]:
        del sender, receiver, slot
        return self._fitted, self._rounds or 0

    def _came(self, delivery: Delivery, sender: int, rank: int, slot: Slot) -> Mask:
        """Which packets of a stream arrive, or are restored."""
        packets = packet_count(slot.length, self.per_packet)
        self._fitted = self._code(packets)
        came: Mask = delivery.arrived((sender, rank, slot.number), np.ones(packets, np.bool_))
        self.traffic.packets += packets
        self.traffic.missing += packets - int(came.sum())
        self.traffic.parity += len(shape_of(self._fitted, packets).of_parity)
        return came

    def _sum(
        self, rank: int, slot: Slot, own: Tensor, parts: dict[int, Tensor], came: dict[int, Mask]
    ) -> Tensor:
        """In the order of ranks, as a deterministic call adds; finished packet by packet."""
        device, stratified = own.device, slot.finish == Finish.STRATIFIED
        others = np.sum(list(came.values()), axis=0, dtype=np.int64)
        total = torch.full_like(own, -0.0)  # of which a sum is what is added to it
        for source in sorted((rank, *parts)):
            if source == rank:
                total = total if stratified else total + own
            else:
                here = self._spread(came[source], slot, device)
                total = torch.where(here, total + parts[source], total)
        if not stratified:
            return total.mul_(self._spread(_ratio(1.0, others + 1), slot, device))
        sources = len(parts)
        full = sources + 1
        total.mul_(self._spread(_ratio(sources, full * others), slot, device))
        mine = np.where(others > 0, 1 / full, 1.0).astype(np.float32)
        return total.add_(own * self._spread(mine, slot, device))

    def _spread(self, values: NDArray[np.generic], slot: Slot, device: torch.device) -> Tensor:
        """One value per packet -> one per element."""
        each = torch.from_numpy(values).to(device, non_blocking=True)
        return each.repeat_interleave(self.per_packet)[: slot.length]


def _ratio(scale: float, count: NDArray[np.int64]) -> NDArray[np.float32]:
    """scale / count, and 0 where nothing was counted."""
    found = np.zeros(len(count))
    np.divide(scale, count, out=found, where=count > 0)
    return found.astype(np.float32)

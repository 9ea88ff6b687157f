"""All-reduces in few bits whose elements are encoded on their device: fewer bytes are copied from
there and back, and the host has nothing to add.

Each rank encodes its contributions to the parts of all others, which are exchanged as bytes; each
adds up its part, encodes the sum, and gathers the sums of all. These are the two phases that the
engine has for tensors of the host, with the same format and the same rounding. Source: Flash
Communication, arXiv 2412.04964, algorithm 1.

It serves reliable calls of groups whose ranks have a host each: what stays in a host isn't encoded,
and where packets may be lost the engine has to know their elements.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.devices.layer import StreamOrder
from lossycoll.devices.registry import Device, device_of
from lossycoll.options.texts import DEVICE_WIRE
from lossycoll.plan import codec
from lossycoll.plan.codec import GROUPS, LowBit
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.engine import codecs

from .collectives import ENCODED_EXCHANGE, ENCODED_GATHER
from .description import CollectiveKind, Description
from .on_device import Lanes
from .reduction import Reduction
from .tensors import DTYPES, contiguous, scaled, spread
from .work import LossyWork, ManyWork

LEAST_BYTES: Final = 1 << 20
"""Smallest call that is served here: of smaller ones two exchanges take longer than one."""
PACKET: Final = 8192
"""Elements that are encoded together; whole groups."""
KEPT: Final = 64
"""Sizes of tensors whose tables are kept."""
FLOATS: Final = DTYPES.keys() - {torch.float64}

Run = Callable[[Description], dist.Work]


class Parts(NamedTuple):
    """A tensor of so many elements in parts, one for each rank."""

    each: int  # Elements of a part; the last ones may be shorter, or empty
    elements: int  # Of all
    world: int  # How many parts

    @classmethod
    def of(cls, elements: int, world: int) -> Parts:
        """Cuts elements into parts of one size but for the last, each of whole groups."""
        unit = max(GROUPS)
        return cls(-(-elements // (world * unit)) * unit, elements, world)

    def length(self, part: int) -> int:
        return min(max(self.elements - part * self.each, 0), self.each)

    def nbytes(self, how: LowBit) -> int:
        """Bytes that a whole part is encoded in."""
        return sum(how.wire_bytes(n) for _, n in _packets(self.each))

    def table(self, how: LowBit, parts: list[tuple[int, int, int]]) -> Tensor:
        """Descriptions of packets, as :meth:`LowBits.encode` takes them. ``parts``: the number of
        each part, where its elements begin, and where its bytes do."""
        rows = []
        for part, first, first_byte in parts:
            at = first_byte
            for begin, n in _packets(self.length(part)):
                rows.append((first + begin, n, at))
                at += how.wire_bytes(n)
        return torch.from_numpy(np.array(rows, np.int64).reshape(-1, 3))


def _packets(elements: int) -> list[tuple[int, int]]:
    """The first element of each packet, and how many it has."""
    return [(at, min(PACKET, elements - at)) for at in range(0, elements, PACKET)]


@dataclass(frozen=True)
class Tables:
    """Tables of what one rank encodes and decodes in a call of one size."""

    parts: Parts  # The parts
    part_bytes: tuple[int, int]  # Of a contribution to a part, and of a part's sum
    sent: Tensor  # Contributions to others, from the tensor
    came: Tensor  # Contributions of others, to rows of one part each
    mean: Tensor  # The own part's sum
    gathered: Tensor  # All sums, to the tensor


def tables_of(elements: int, world: int, rank: int, hows: tuple[LowBit, LowBit], to: str) -> Tables:
    """The tables, on a device, where the current stream is to use them."""
    parts = Parts.of(elements, world)
    first, second = (parts.nbytes(how) for how in hows)
    others = [part for part in range(world) if part != rank]
    tables = (
        parts.table(hows[0], [(r, r * parts.each, r * first) for r in others]),
        parts.table(hows[0], [(rank, r * parts.each, r * first) for r in others]),
        parts.table(hows[1], [(rank, 0, 0)]),
        parts.table(hows[1], [(r, r * parts.each, r * second) for r in range(world)]),
    )
    return Tables(parts, (first, second), *(table.to(to) for table in tables))


class HostLowBits:
    """Low-bit codec of a device's tensors by the host: it waits for the device, and copies all.

    The functions of lossycoll/devices/lowbit_kernels.py do the same on a GPU."""

    def encode(
        self, values: Tensor, packets: Tensor, to_bytes: Tensor, how: LowBit, *, key: int, **_: Any
    ) -> Tensor:
        x, data = values.detach().cpu().numpy(), to_bytes.cpu()
        found = 0
        for first, n, at in packets.tolist():
            part = x[first : first + n]
            codecs.encode(how, part, data.numpy()[at : at + how.wire_bytes(n)], key << 32 | first)
            if not np.isfinite(part).all():
                starts = range(0, n, how.group)
                found += sum(not np.isfinite(part[at : at + how.group]).all() for at in starts)
        to_bytes.copy_(data)
        return torch.tensor([found], dtype=torch.int32, device=values.device)

    def decode(
        self, from_bytes: Tensor, packets: Tensor, to_values: Tensor, how: LowBit, **_: Any
    ) -> None:
        data, x = from_bytes.cpu().numpy(), to_values.detach().cpu()
        for first, n, at in packets.tolist():
            codecs.decode(how, data[at : at + how.wire_bytes(n)], x.numpy()[first : first + n])
        with torch.inference_mode():
            to_values.copy_(x)


class DeviceWire:
    """Low-bit transport of one group's tensors on devices."""

    def __init__(self, endpoint: Endpoint, lanes: Lanes) -> None:
        self._endpoint = endpoint
        self._lanes = lanes
        self._lock = threading.Lock()
        self._calls = 0
        self._nan_groups: dict[Device, tuple[Tensor, Any]] = {}
        """Count of each device, and the place in a stream after which it is right."""
        # Kept by the group: its streams alone use them.
        self._tables_of: Final = lru_cache(maxsize=KEPT)(tables_of)

    @cached_property
    def _may_serve(self) -> bool:
        endpoint = self._endpoint
        shares = endpoint.topology.shares_hosts
        return endpoint.world > 1 and not shares and not endpoint.options.continues

    def serves(self, call: Description, encoding: str, reduction: Reduction | None) -> bool:
        """True if a reliable call is served here; alike on all ranks."""
        native = reduction is not None and reduction.native
        if not native or call.dtype not in FLOATS or call.nbytes < LEAST_BYTES:
            return False
        both = codec.phases(encoding)
        return self._may_serve and all(codec.codec_of(one, "f32").low for one in both)

    def _codec_of(self, device: Device) -> Any:
        """The codec on a device. Where it can't, this host encodes, by the same exchanges."""
        disabled = DEVICE_WIRE in self._endpoint.options.disabled
        found = None if disabled else device.layer.low_bits()
        return found or HostLowBits()

    def all_reduce(
        self, call: Description, encoding: str, reduction: Reduction, run: Run
    ) -> LossyWork:
        """Serves a call that :meth:`serves` is true of.

        It returns when all is queued; where the device's streams can't wait for the network, or the
        host encodes, when the result is nearly there.
        """
        tensor, endpoint = call.writes[0], self._endpoint
        device = device_of(tensor)
        first, second = (codec.codec_of(one, "f32").low for one in codec.phases(encoding))
        assert first is not None
        assert second is not None
        detail = f"{encoding} of {tensor.dtype}[{tensor.numel()}] {call.op.op.name}"
        low_bits = self._codec_of(device)
        lane = self._lanes.on(device, "few bits")
        with self._lock:
            count, self._calls = self._calls, self._calls + 1
        keys = [self._key(count, phase) for phase in range(2)]
        rank, world = endpoint.rank, endpoint.world
        with device.layer.aside(lane, tensor):
            whole = scaled(contiguous(tensor.detach()), reduction.factor).view(-1)
            values = whole.to(torch.float32)
            tables = self._tables_of(
                *(values.numel(), world, rank, (first, second), str(tensor.device))
            )
            parts, (sent_bytes, mean_bytes) = tables.parts, tables.part_bytes
            most = min(parts.each, PACKET)
            data = values.new_empty((2, world * sent_bytes), dtype=torch.uint8)
            how = {"most_elements": most}
            nans = low_bits.encode(values, tables.sent, data[0], first, key=keys[0], **how)
            exchanged = run(_of_bytes(ENCODED_EXCHANGE, data[0], data[1], detail))
            exchanged.wait()
            rows = values.new_empty((world, parts.each))
            low_bits.decode(data[1], tables.came, rows.view(-1), first, **how)
            begin, own = rank * parts.each, parts.length(rank)
            rows[rank, :own] = values[begin : begin + own]
            total = rows[:, :own].sum(0)
            if reduction.mean:
                total /= world
            sums = values.new_empty((world + 1, mean_bytes), dtype=torch.uint8)
            nans += low_bits.encode(total, tables.mean, sums[-1], second, key=keys[1], **how)
            gathered = run(_of_bytes(ENCODED_GATHER, sums[-1], sums[:-1].view(-1), detail))
            gathered.wait()
            low_bits.decode(sums[:-1].view(-1), tables.gathered, values, second, **how)
            if values.data_ptr() != tensor.data_ptr():
                spread(values.view(tensor.shape), [tensor])
            after = StreamOrder(device.layer, lane, self._note(device, nans), ahead=True)
        return ManyWork([exchanged, gathered], call.filled, after)

    def _key(self, count: int, phase: int) -> int:
        """Key for rounding at random: of the group, the call, the rank and the phase."""
        text = f"{self._endpoint.group} {count} {self._endpoint.rank} {phase}"
        return zlib.crc32(text.encode())

    def _note(self, device: Device, nans: Tensor) -> Any:
        """Adds up on the device, where nobody waits for it now. Returns the place after that."""
        with self._lock:
            if device in self._nan_groups:
                nans += self._nan_groups[device][0]
            place = device.layer.current().record()
            self._nan_groups[device] = nans, place
        return place

    def nan_groups(self) -> int:
        """Groups with a NaN or an infinity that were encoded here until now; it waits for them."""
        with self._lock:
            counted = list(self._nan_groups.values())
        for _, place in counted:
            place.wait()
        return sum(int(nans.item()) for nans, _ in counted)


def _of_bytes(kind: CollectiveKind, own: Tensor, came: Tensor, detail: str) -> Description:
    """``detail``: what the bytes mean, which all ranks must agree on."""
    return Description(kind, [own], [came], came.numel(), compared=own, detail=detail)

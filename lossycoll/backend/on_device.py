"""The device's side of one call: its buffers go by way of host memory, where the engine works."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.devices.bounce import Bounce
from lossycoll.devices.layer import DeviceError, Lane, StreamOrder
from lossycoll.devices.registry import CALL_PIECES, Device, abandon, device_of
from lossycoll.errors import EngineError
from lossycoll.options.texts import STREAM_WAIT
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import Operation

from .description import Description, Filled, Loss, Staged, Submission, Submit
from .tensors import address
from .work import EngineWork, ManyWork

PIECE_BYTES: Final = 8 << 20
"""Bytes of a piece of a divided call: enough for the network to be busy meanwhile. Pieces are a
multiple of it where there would be more than ``CALL_PIECES``."""
RANK_BYTES: Final = 1 << 18
"""A rank's share of a piece at least: in streams of few packets more is lost that parity can't
bring back."""


class Lanes:
    """Lanes of one group on the devices that its tensors have lain on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lanes: dict[tuple[Device, str], Lane] = {}

    def on(self, device: Device, use: str) -> Lane:
        key = device, use
        with self._lock:
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = device.take_lane()
            return found

    def give_back(self) -> None:
        """To be called when all of the group's calls have ended. Idempotent."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for (device, _), lane in lanes.items():
            device.give_back(lane)


class OnDevice:
    """One call's, in this order: ``begin``, ``submit``, and ``submitted`` or ``give_up``."""

    def __init__(self, endpoint: Endpoint, lanes: Lanes, call: Description) -> None:
        self._endpoint = endpoint
        self._lanes = lanes
        self._kind = call.kind
        self._root = call.root
        self._device = device_of((call.reads or call.writes)[0])
        self._bounce: Bounce | None = None
        self._submitted: list[Operation] = []

    def begin(self, staged: Staged, *, keeps: bool, divides: bool = False) -> Staged:
        """Queues the copy of what the call reads."""
        device, endpoint = self._device, self._endpoint
        if endpoint.world == 1:
            # A copy of source to target is every collective of a group of one rank.
            source, target = staged.source.detach(), staged.target.detach()
            if address(source) != address(target):
                with torch.inference_mode():
                    target.reshape(-1).copy_(source.reshape(-1)[: target.numel()])
            return staged
        try:
            wakers = endpoint.wakers
        except EngineError as error:
            raise DeviceError(str(error), errno=error.errno) from error
        lane = self._lanes.on(device, "calls")
        cuts = _cuts(staged.target, endpoint.world) if divides else ()
        device.retirement.wait_for_room(lane, len(cuts) + 1)
        is_root, filled = self._root == endpoint.rank, self._kind.filled
        bounce = self._bounce = Bounce(
            *(device.layer, lane, device.pool, staged.source, staged.target),
            wakers=wakers,
            cuts=cuts,
            keeps=keeps,
            fills=filled is Filled.ALL or is_root == (filled is Filled.ROOT),
            returns_source=self._kind.writes_source,
            spoils=self._kind.spoils or self._kind.loss is Loss.REDUCTION,
            may_be_ahead=STREAM_WAIT not in endpoint.options.disabled,
            epilogue=staged.epilogue,
            among=staged.among,
        )
        bounce.fill()
        if staged.among is not None:
            return Staged(bounce.source, bounce.target, among=bounce.finish)
        return Staged(bounce.source, bounce.target)

    @property
    def pieces(self) -> int:
        return 1 if self._bounce is None else len(self._bounce.pieces)

    def submit(self, submit: Submit, s: Submission) -> Operation | tuple[Operation, ...]:
        """Submits the call, each piece by itself: it starts when its input is there."""
        bounce = self._bounce
        if bounce is None:
            return submit(s._replace(call_options=s.call_options._replace(on_device=True)))
        for number, piece in enumerate(bounce.pieces):
            # Nobody waits for it at once: the engine doesn't count on the caller's thread.
            given = s.call_options._replace(gate=piece.gate, future=True)
            if not bounce.ahead and given.among is None:
                given = given._replace(epilogue=partial(bounce.finish, (), number))
            made = submit(s._replace(source=piece.source, target=piece.target, call_options=given))
            if len(bounce.pieces) == 1:
                return made
            assert isinstance(made, Operation)
            self._submitted.append(made)
        return tuple(self._submitted)

    def submitted(self, works: Sequence[EngineWork], operations: Sequence[Operation]) -> dist.Work:
        """Queues the way back."""
        bounce, last = self._bounce, works[-1]
        if bounce is None:
            layer = self._device.layer
            last.streams = StreamOrder(layer, None, layer.current().record())
            return last
        # What comes before the data of an undivided call is waited for by the device's thread: if
        # it fails, so does the group, and with it the data. Pieces may end in any order.
        each = works if len(bounce.pieces) > 1 else [last]
        for work in each:
            work.streams = bounce
        try:
            self._come_back(bounce)
        finally:
            self._bounce = None  # it is the thread's, which waits for its end
            self._device.retirement.add(bounce, operations)
        return last if len(each) == 1 else ManyWork(each, last.result())

    def give_up(self, *, submitted: bool) -> None:
        """Ends what :meth:`begin` began, where a call raises before :meth:`submitted` is done.

        Where the engine has the operation all the same (``submitted``), or some pieces of it, the
        operation goes on, and keeps its memory.
        """
        bounce = self._bounce
        if bounce is None:
            return
        if submitted or self._submitted:
            abandon(bounce)
            if submitted:
                self._come_back(bounce)
        else:
            self._device.retirement.add(bounce, ())

    def _come_back(self, bounce: Bounce) -> None:
        """Also where Ctrl-C comes meanwhile: the call goes on."""
        try:
            bounce.come_back()
        except KeyboardInterrupt:
            if not bounce.is_returning:
                bounce.come_back()
            raise


def _cuts(tensor: Tensor, world: int) -> Sequence[int]:
    """Ends of a call's pieces, in elements; alike on all ranks."""
    least = max(PIECE_BYTES, world * RANK_BYTES) // tensor.element_size()
    elements = tensor.numel()
    each = least * max(1, -(-elements // (least * CALL_PIECES)))
    return range(each, elements - each // 2, each)

"""torch's sends and receives, as messages: what is refused, and where the bytes lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

import torch.distributed as dist
from torch import Tensor

from lossycoll.devices.bounce import Bounce
from lossycoll.devices.registry import device_of, is_served
from lossycoll.errors import UnsupportedError
from lossycoll.options.scopes import scope, within
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.p2p.messages import Messages, Tolerance, Transfer

from . import checks, spans
from .devices import ServedDevices
from .on_device import Lanes
from .resource_limits import not_submitted
from .spans import Span
from .tensors import LOSSY_DTYPES, address, contiguous, copy_back, nbytes
from .work import Coalescing, MessageWork

MOST_TAG: Final = (1 << 63) - 1


class PointToPoint:
    """The sends and receives of one group. They are posted at once, in the order of the calls.

    ``messages``: the group's; None in a group of one rank.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        messages: Messages | None,
        coalescing: Coalescing,
        devices: ServedDevices,
        lanes: Lanes,
    ) -> None:
        self._endpoint = endpoint
        self._messages = messages
        self._coalescing = coalescing
        self._devices = devices
        self._lanes = lanes

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Sends the one tensor of ``tensors`` to rank ``peer``."""
        call, messages = self._admit(f"send to {peer}", tensors, peer, tag)
        source = contiguous(tensors[0])
        tolerance = self._tolerance(source)
        bounce = self._bounce(call, source)
        if bounce is not None:
            source = bounce.source
        with self._span(call, tensors) as span:
            transfer = messages.send(
                call,
                address(source),
                source.element_size(),
                peer,
                tag,
                keep=source,
                timeout=self._endpoint.timeout,
                tolerance=tolerance,
            )
        return self._posted(transfer, tensors, bounce, span)

    def receive(self, tensors: list[Tensor], peer: int | None, tag: int) -> dist.Work:
        """Receives into the one tensor of ``tensors``, from rank ``peer`` (None: from any)."""
        name = "receive" if peer is None else f"receive from {peer}"
        call, messages = self._admit(name, tensors, peer, tag)
        checks.check_writable(self._endpoint.health.where, name, tensors)
        target = contiguous(tensors[0])
        tolerance = self._tolerance(target)
        finish = copy_back(target, tensors[0])
        # Where packets may be missing, what doesn't come stays as it is.
        bounce = self._bounce(call, target, reads=tolerance is not None, epilogue=finish)
        if bounce is not None:
            target, finish = bounce.target, partial(bounce.finish, ())
        with self._span(call, tensors) as span:
            transfer = messages.receive(
                call,
                address(target),
                target.element_size(),
                peer,
                tag,
                keep=target,
                timeout=self._endpoint.timeout,
                finish=finish,
                tolerance=tolerance,
            )
        return self._posted(transfer, tensors, bounce, span)

    def _span(
        self, call: Collective, tensors: list[Tensor]
    ) -> contextlib.AbstractContextManager[Span | None]:
        """The message's span in torch's profiler, if that runs."""
        if not spans.are_wanted():
            return contextlib.nullcontext()
        return spans.of_message(self._endpoint.health.where.group, call, tensors)

    def _bounce(
        self,
        call: Collective,
        tensor: Tensor,
        *,
        reads: bool = True,
        epilogue: Callable[[], None] | None = None,
    ) -> Bounce | None:
        """The way of a message by host memory; None for a tensor that lies there."""
        if not is_served(tensor) or not tensor.numel():
            return None
        try:
            device = device_of(tensor)
            bounce = Bounce(
                *(device.layer, self._lanes.on(device, "messages"), device.pool, tensor, tensor),
                reads=reads,
                may_be_ahead=False,
                epilogue=epilogue,
            )
            bounce.fill()
            if reads:  # a message can't be gated
                bounce.wait_until_copied()
        except Exception as error:
            raise not_submitted(self._endpoint, call, error) from error
        return bounce

    def _posted(
        self, transfer: Transfer, tensors: list[Tensor], bounce: Bounce | None, span: Span | None
    ) -> dist.Work:
        if span is not None:
            span.ends_with(transfer)
        work = MessageWork(self._endpoint, transfer, tensors)
        if bounce is not None:
            work.streams = bounce
            device_of(tensors[0]).retirement.add(bounce, (transfer,))
        return self._coalescing.add(work)

    def _tolerance(self, tensor: Tensor) -> Tolerance | None:
        """This end's tolerance of loss: none outside a scope of ``lossy()``."""
        around = scope()
        if around is None or not around.lossy_copies or tensor.dtype not in LOSSY_DTYPES:
            return None
        options = within(self._endpoint.options, around)
        if nbytes(tensor) < options.lossy_min_bytes:
            return None
        return Tolerance(options.repair, options.on_missing == "zero")

    def _admit(
        self, name: str, tensors: list[Tensor], peer: int | None, tag: int
    ) -> tuple[Collective, Messages]:
        """Refuses what can't be served."""
        where = self._endpoint.health.where
        if len(tensors) != 1:
            raise UnsupportedError(f"{where}: {name} got {len(tensors)} tensors, but takes one")
        tensor = tensors[0]
        checks.check_readable(where, name, tensors)
        self._devices.check(name, tensors)
        if not 0 <= tag <= MOST_TAG:
            raise UnsupportedError(f"{where}: {name} got tag {tag}, wanted 0 to 2^63 - 1")
        if peer == where.rank or where.world == 1:
            raise UnsupportedError(
                f"{where}: {name} is to this rank itself; copy the tensor instead"
            )
        if peer is not None and not 0 <= peer < where.world:
            raise UnsupportedError(f"{where}: {name}: there are ranks 0 to {where.world - 1} only")
        call = Collective(name, tensor.dtype, tensor.numel(), f"tag {tag}")
        self._endpoint.health.admit(call)
        assert self._messages is not None
        return call, self._messages

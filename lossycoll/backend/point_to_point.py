"""torch's sends and receives, as messages: what is refused, and where the bytes lie."""

from __future__ import annotations

from typing import Final

import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import UnsupportedError
from lossycoll.options.scopes import scope, within
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.p2p.messages import Messages, Tolerance

from . import checks
from .coalescing import Coalescing
from .tensors import LOSSY_DTYPES, address, contiguous, copy_back, nbytes
from .work import MessageWork

MOST_TAG: Final = (1 << 63) - 1


class PointToPoint:
    """The sends and receives of one group. They are posted at once, in the order of the calls.

    Args:
        endpoint: The group's endpoint.
        messages: The group's; None in a group of one rank.
        coalescing: Takes every work.
    """

    def __init__(
        self, endpoint: Endpoint, messages: Messages | None, coalescing: Coalescing
    ) -> None:
        self._endpoint = endpoint
        self._messages = messages
        self._coalescing = coalescing

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Sends the one tensor of ``tensors`` to rank ``peer``."""
        call, messages = self._admit(f"send to {peer}", tensors, peer, tag)
        source = contiguous(tensors[0])
        transfer = messages.send(
            call,
            address(source),
            source.element_size(),
            peer,
            tag,
            keep=source,
            timeout=self._endpoint.timeout,
            tolerance=self._tolerance(source),
        )
        return self._coalescing.add(MessageWork(self._endpoint, transfer, tensors))

    def receive(self, tensors: list[Tensor], peer: int | None, tag: int) -> dist.Work:
        """Receives into the one tensor of ``tensors``, from rank ``peer`` (None: from any)."""
        name = "receive" if peer is None else f"receive from {peer}"
        call, messages = self._admit(name, tensors, peer, tag)
        checks.check_writable(self._endpoint.health.where, name, tensors)
        target = contiguous(tensors[0])
        transfer = messages.receive(
            call,
            address(target),
            target.element_size(),
            peer,
            tag,
            keep=target,
            timeout=self._endpoint.timeout,
            finish=copy_back(target, tensors[0]),
            tolerance=self._tolerance(target),
        )
        return self._coalescing.add(MessageWork(self._endpoint, transfer, tensors))

    def _tolerance(self, tensor: Tensor) -> Tolerance | None:
        """What this end puts up with: something in a scope of ``lossy()`` alone."""
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
        if not 0 <= tag <= MOST_TAG:
            raise UnsupportedError(f"{where}: {name} got tag {tag}, wanted 0 to 2^63 - 1")
        if peer == where.rank or self._messages is None:
            raise UnsupportedError(
                f"{where}: {name} is to this rank itself; copy the tensor instead"
            )
        if peer is not None and not 0 <= peer < where.world:
            raise UnsupportedError(f"{where}: {name}: there are ranks 0 to {where.world - 1} only")
        call = Collective(name, tensor.dtype, tensor.numel(), f"tag {tag}")
        self._endpoint.health.admit(call)
        return call, self._messages

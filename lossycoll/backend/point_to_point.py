"""torch's sends and receives as messages, and the monitored barrier, which is made of them.

The monitored barrier names ranks that are missing: each reports to rank 0, by messages. It isn't a
row of the table of collectives, and doesn't go through ``Dispatcher.run``: there is no work, and
the ranks' timeouts may differ.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from lossycoll.devices.bounce import Bounce
from lossycoll.devices.registry import device_of, is_served
from lossycoll.errors import LossyError, OperationTimeout, UnsupportedError
from lossycoll.options.scopes import scope, within
from lossycoll.runtime.collectives.point_to_point import Messages, Tolerance, Transfer
from lossycoll.runtime.core.call import LONGEST, Collective

from . import checks, spans
from .description import CollectiveKind, Description, Loss
from .dispatch import Dispatcher
from .staging import two_buffers
from .tensors import LOSSY_DTYPES, address, contiguous, copy_back, nbytes
from .work import EngineWork, not_submitted

MOST_TAG: Final = (1 << 63) - 1


class PointToPoint:
    """The sends and receives of one group. They are posted at once, in the order of the calls.
    ``messages``: the group's; None in a group of one rank."""

    def __init__(self, dispatcher: Dispatcher, messages: Messages | None) -> None:
        self._dispatcher = dispatcher
        self._endpoint = dispatcher.endpoint
        self._messages = messages

    def post(
        self, name: str, tensors: list[Tensor], peer: int | None, tag: int, *, fills: bool
    ) -> dist.Work:
        """Posts a send, or a receive (``fills``), of the one tensor of ``tensors``. ``peer``: the
        other rank; None: any."""
        where, messages = self._dispatcher.where, self._messages
        tensor = checks.only(where, name, tensors)
        checks.check_readable(where, name, tensors)
        self._dispatcher.devices.check(name, tensors)
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
        assert messages is not None  # of a group that has members
        if fills:
            checks.check_writable(where, name, tensors)
        buffer = contiguous(tensor)
        tolerance = self._tolerance(buffer)
        finish = copy_back(buffer, tensor) if fills else None
        # Where packets may be missing, what doesn't come stays as it is.
        reads = not fills or tolerance is not None
        bounce = self._bounce(call, buffer, reads, finish)
        if bounce is not None:
            buffer = bounce.source
            if fills:
                finish = partial(bounce.finish, ())
        span = None
        if profiler._is_profiler_enabled:
            span = spans.Span(where.group, call, tensors, nbytes(tensor))
        with contextlib.nullcontext() if span is None else span:
            transfer = messages.post(
                *(call, address(buffer), buffer.element_size(), peer, tag),
                is_send=not fills,
                keep=buffer,
                finish=finish,
                timeout=self._endpoint.operations.timeout,
                tolerance=tolerance,
            )
        if span is not None:
            span.ends_with([transfer])
        work = EngineWork(self._endpoint, transfer, tensors)
        if bounce is not None:
            work.streams = bounce
            device_of(tensor).retirement.add(bounce, (transfer,))
        return self._dispatcher.coalescing.add(work)

    def _bounce(
        self, call: Collective, tensor: Tensor, reads: bool, epilogue: Callable[[], None] | None
    ) -> Bounce | None:
        """The way of a message by host memory; None for a tensor that lies there."""
        if not is_served(tensor) or not tensor.numel():
            return None
        try:
            device = device_of(tensor)
            lane = self._dispatcher.lanes.on(device, "messages")
            bounce = Bounce(
                *(device.layer, lane, device.pool, tensor, tensor),
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

    def _tolerance(self, tensor: Tensor) -> Tolerance | None:
        """This end's tolerance of loss: none outside a scope of ``lossy()``."""
        around = scope()
        if around is None or not around.lossy_copies or tensor.dtype not in LOSSY_DTYPES:
            return None
        options = within(self._endpoint.options, around)
        if nbytes(tensor) < options.lossy_min_bytes:
            return None
        return Tolerance(options.repair, options.on_missing == "zero")


KIND: Final = CollectiveKind("monitored_barrier", Loss.NEVER, two_buffers)
SLICE_SECONDS: Final = 0.2
"""Period at which a wait looks after the group."""
GRACE_SECONDS: Final = 2.0
"""Time by which other ranks wait longer than rank 0, whose error says who is missing."""


def monitored_barrier(
    dispatcher: Dispatcher, messages: Messages | None, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Waits for all ranks. ``messages``: the group's; None in a group of one rank."""
    call, health = dispatcher.named(Description(KIND, [], [])), dispatcher.health
    rank = health.where.rank
    dispatcher.issue(call)
    try:
        if rank == 0 and not timeout:
            text = (
                f"{health.where}: {call.numbered}: Rank 0 timed out in monitoredBarrier after 0 "
                f"ms; give it a longer timeout"
            )
            raise OperationTimeout(text, peer=0)
        if messages is not None:
            barrier = _Barrier(dispatcher, call, messages, timeout.total_seconds())
            barrier.gather(wait_all_ranks) if rank == 0 else barrier.report()
    except LossyError as error:
        dispatcher.fail(call, error)
        # What gloo says, which programs may look for.
        reached = (
            f"; Rank {rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0"
        )
        again = (health.failure or error).again(call.numbered + (reached if rank else ""))
        raise again from None
    except BaseException as error:
        dispatcher.fail_halfway(call, error)
        raise


class _Barrier:
    """One barrier at one rank. Its messages can't meet a user's, whose tags are smaller."""

    def __init__(
        self, dispatcher: Dispatcher, call: Collective, messages: Messages, seconds: float
    ) -> None:
        self._health = dispatcher.health
        self._where = dispatcher.where
        self._call = call
        self._messages = messages
        self._seconds = seconds
        self._begin = time.monotonic()
        self._long_wait = dispatcher.health.long_wait(call, self._begin)
        self._named = Collective(call.name, torch.uint8, 1)
        self._named.seq = call.seq

    def gather(self, wait_all_ranks: bool) -> None:
        """Rank 0: hears from each rank, and then answers all."""
        where = self._where
        reports = {peer: self._post(peer, is_send=False) for peer in range(1, where.world)}
        missing = []
        for peer, report in reports.items():
            if not self._came(report, self._seconds):
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(where.peer(rank) for rank in missing)
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise self._timeout(
                f"{names} didn't take part within {self._seconds:g} s; stuck, or still computing? "
                f"({ranks} failed to pass monitoredBarrier in {round(self._seconds * 1e3)} ms)",
                missing[0],
            )
        for peer in reports:
            self._post(peer, is_send=True)

    def report(self) -> None:
        """Another rank: reports to rank 0, and waits for its answer."""
        self._post(0, is_send=True)
        if not self._came(self._post(0, is_send=False), self._seconds + GRACE_SECONDS):
            raise self._timeout(
                f"{self._where.peer(0)} didn't take part within {self._seconds:g} s, or waits for "
                f"another rank; rank 0's error names who is missing",
                0,
            )

    def _timeout(self, text: str, peer: int) -> OperationTimeout:
        return OperationTimeout(f"{self._where}: {self._call.numbered}: {text}", peer=peer)

    def _post(self, peer: int, *, is_send: bool) -> Transfer:
        """Posts a message of one byte."""
        room, tag = torch.zeros(1, dtype=torch.uint8, device="cpu"), MOST_TAG + 1 + self._call.seq
        # The wait has a limit of its own.
        limit, message = LONGEST.total_seconds(), (self._named, room.data_ptr(), 1, peer, tag)
        return self._messages.post(*message, is_send=is_send, keep=room, timeout=limit)

    def _came(self, transfer: Transfer, seconds: float) -> bool:
        """Tells whether a message came, until ``seconds`` after the beginning; raises its error."""
        now = time.monotonic()
        while not transfer.poll(min(SLICE_SECONDS, max(0.0, self._begin + seconds - now))):
            now = time.monotonic()
            if now >= self._begin + seconds:
                return False
            self._health.admit(self._call)
            self._long_wait.ask_if_due(now)
        if transfer.error is not None:
            raise transfer.error
        return True

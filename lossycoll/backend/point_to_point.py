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

from lossycoll.devices.bounce import Bounce
from lossycoll.devices.registry import device_of, is_served
from lossycoll.errors import LossyError, OperationTimeout, UnsupportedError
from lossycoll.options.scopes import scope, within
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.point_to_point import Messages, Tolerance, Transfer
from lossycoll.runtime.core.call import LONGEST, Collective

from . import checks, spans
from .description import CollectiveKind, Description, Loss
from .devices import ServedDevices
from .dispatch import Dispatcher
from .on_device import Lanes
from .resource_limits import not_submitted
from .spans import Span
from .staging import two_buffers
from .tensors import LOSSY_DTYPES, address, contiguous, copy_back, nbytes
from .work import Coalescing, MessageWork

MOST_TAG: Final = (1 << 63) - 1


class PointToPoint:
    """The sends and receives of one group. They are posted at once, in the order of the calls.
    ``messages``: the group's; None in a group of one rank."""

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
    dispatcher.issue(call)
    try:
        if health.where.rank == 0:
            _gather(dispatcher, call, messages, timeout, wait_all_ranks)
        elif messages is not None:
            _report(dispatcher, call, messages, timeout)
    except LossyError as error:
        dispatcher.fail(call, error)
        there = "" if health.where.rank == 0 else f"; {_reached(health.where.rank)}"
        raise (health.failure or error).again(call.numbered + there) from None
    except BaseException as error:
        dispatcher.fail_halfway(call, error)
        raise


def _reached(rank: int) -> str:
    """What gloo says at a rank other than 0, which programs may look for."""
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
        f"for send/recv from rank 0"
    )


def _gather(
    dispatcher: Dispatcher,
    call: Collective,
    messages: Messages | None,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> None:
    """Rank 0: hears from each rank, and then answers all."""
    where, milliseconds = dispatcher.where, round(timeout.total_seconds() * 1e3)
    if not timeout:
        text = (
            f"{where}: {call.numbered}: Rank 0 timed out in monitoredBarrier after 0 ms; "
            f"give it a longer timeout"
        )
        raise OperationTimeout(text, peer=where.rank)
    if messages is None:
        return
    post, came = _poster(messages, call), _waiter(dispatcher, call, timeout.total_seconds())
    reports = {peer: post(messages.receive, peer) for peer in range(1, where.world)}
    missing = []
    for peer, report in reports.items():
        if not came(report):
            missing.append(peer)
            if not wait_all_ranks:
                break
    if missing:
        names = ", ".join(where.peer(rank) for rank in missing)
        ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        text = (
            f"{where}: {call.numbered}: {names} didn't take part within "
            f"{timeout.total_seconds():g} s; stuck, or still computing? "
            f"({ranks} failed to pass monitoredBarrier in {milliseconds} ms)"
        )
        raise OperationTimeout(text, peer=missing[0])
    for peer in reports:
        post(messages.send, peer)


def _report(
    dispatcher: Dispatcher, call: Collective, messages: Messages, timeout: timedelta
) -> None:
    """Another rank: reports to rank 0, and waits for its answer."""
    where, post = dispatcher.where, _poster(messages, call)
    post(messages.send, 0)
    if not _waiter(dispatcher, call, timeout.total_seconds() + GRACE_SECONDS)(
        post(messages.receive, 0)
    ):
        text = (
            f"{where}: {call.numbered}: {where.peer(0)} didn't take part within "
            f"{timeout.total_seconds():g} s, or waits for another rank; rank 0's error names who "
            f"is missing"
        )
        raise OperationTimeout(text, peer=0)


def _poster(
    messages: Messages, call: Collective
) -> Callable[[Callable[..., Transfer], int], Transfer]:
    """Posts a message of one byte by ``send`` or ``receive``, which no call of a user's can meet:
    their tags are smaller."""
    named = Collective(call.name, torch.uint8, 1)
    named.seq = call.seq
    token = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def post(by: Callable[..., Transfer], peer: int) -> Transfer:
        room, tag = token.clone(), MOST_TAG + 1 + call.seq
        # The wait has a limit of its own.
        limit = LONGEST.total_seconds()
        return by(named, room.data_ptr(), 1, peer, tag, keep=room, timeout=limit)

    return post


def _waiter(dispatcher: Dispatcher, call: Collective, seconds: float) -> Callable[[Transfer], bool]:
    """Tells whether a message came, until ``seconds`` from now; raises its error."""
    begin = time.monotonic()
    long_wait = dispatcher.health.long_wait(call, begin)

    def came(transfer: Transfer) -> bool:
        now = time.monotonic()
        while not transfer.poll(min(SLICE_SECONDS, max(0.0, begin + seconds - now))):
            now = time.monotonic()
            if now >= begin + seconds:
                return False
            dispatcher.health.admit(call)
            long_wait.ask_if_due(now)
        if transfer.error is not None:
            raise transfer.error
        return True

    return came

"""torch's Work objects: how completion and errors reach the caller.

``wait`` raises typed errors. ``get_future`` is a ``then`` child that raises: the only form in which
C++ (DDP's reducer) sees a failure at all; ``Future.set_exception`` would look like success.

DDP's builtin hooks take results from C++. ``FP16_COMPRESS`` reads a C++ list of tensors from its
future, and a future that Python makes holds an object: it gets one of its own on the CPU, and a
refusal else. ``ALLREDUCE`` and plain DDP take either.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from lossycoll.devices.layer import StreamOrder
from lossycoll.devices.registry import is_served
from lossycoll.errors import EngineError, LossyError, UnsupportedError
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.point_to_point import Transfer
from lossycoll.runtime.core.call import Collective, Operation
from lossycoll.runtime.engine.failures import Code

from .overloads import opaque

Future = torch.futures.Future[Any]
BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__

_thread: Final = threading.local()
"""``completing`` is set while a thread runs what was given to ``then`` of an operation's future."""


@opaque
class LossyWork(dist.Work):
    """Base of all works."""

    _result: list[Tensor]
    _future: Future | None = None

    def result(self) -> list[Tensor]:
        """The tensors that the call fills; it doesn't wait."""
        return self._result

    def get_future(self) -> Future:
        """A future with the result; it completes without a wait, and raises the call's error."""
        if self._future is None:
            self._future = self._make_future()
        return typed(self._future, self._result) if asked_by_hook(self._result) else self._future

    def _make_future(self) -> Future:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits: on a CPU there is nothing else to synchronise with."""
        self.wait()

    def wait_on_host(self) -> None:
        """Returns when the call is done, wherever its tensors lie."""
        self.wait()

    def wait_result(self) -> None:
        """Returns when what the call gives can be read, perhaps before :meth:`wait` would: what
        this rank sends may still be asked for, so no tensor of the call may be written until
        :meth:`wait` has returned.
        """
        self.wait()

    def is_success(self) -> bool:
        """True if the call is done, without an error."""
        return self.is_completed() and self.exception() is None

    def source_rank(self) -> int:
        """The rank that a receive was served by; -1 for anything else."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()


@opaque
class EngineWork(LossyWork):
    """An operation of the engine."""

    def __init__(self, endpoint: Endpoint, operation: Operation, result: list[Tensor]) -> None:
        # Written out, as wait() is: after computing, each call of Python takes microseconds.
        dist.Work.__init__(self)
        self._result = result
        self._endpoint = endpoint
        self.operation: Final = operation
        self.streams: StreamOrder | None = None
        """Order of a device's streams after the result, if the tensors lie on one."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True when the call is done; for tensors on a device, when the caller's stream
        will wait for it, perhaps before it is done. It raises what is known by then; the next call
        raises the rest.

        ``timeout``: how long to wait; None or zero: until the call ends by itself.
        """
        streams, operation = self.streams, self.operation
        if streams is None:
            if not operation.done or operation.error is not None:
                operation.wait(timeout.total_seconds() if timeout else None)
            return True
        try:
            if not streams.ahead or operation.done:
                operation.wait(timeout.total_seconds() if timeout else None)
        finally:
            # Also after an error: what was queued ahead still comes.
            streams.order_current()
        return True

    def wait_on_host(self) -> None:
        self.wait()
        self.operation.wait()

    def wait_result(self) -> None:
        if self.streams is None:
            self.operation.wait_result()
        else:
            self.wait()

    def source_rank(self) -> int:
        """The rank that a receive was served by, once that is known; -1 for anything else."""
        peer = self.operation.peer if isinstance(self.operation, Transfer) else None
        return -1 if peer is None else peer

    def _make_future(self) -> Future:
        operation, result, streams = self.operation, self._result, self.streams
        in_order = self._endpoint.options.futures == "in_order"
        self._endpoint.health.runs_callbacks |= not in_order
        # Complete before anyone has it: also inside a callback, whose thread may be the one that
        # completes futures. Errors are the future's.
        if in_order or getattr(_thread, "completing", False):
            with contextlib.suppress(LossyError):
                self.wait_on_host()
        future, settle = _promise([] if streams is None else [streams])

        def resolve() -> None:
            error = operation.error
            value = result if error is None else error.again(operation.call.numbered)
            outer, _thread.completing = getattr(_thread, "completing", False), True
            try:
                settle(value)
            finally:
                _thread.completing = outer

        operation.on_done(resolve)
        if not operation.done:
            self._endpoint.watcher.complete(operation)
        return future

    def is_completed(self) -> bool:
        """True if the call is done, well or not."""
        if not self.operation.poll():
            return False
        end = None if self.streams is None else self.streams.end
        return end is None or bool(end.is_done())

    def exception(self) -> LossyError | None:
        return self.operation.error


class ManyWork(LossyWork):
    """Several works that count as one. ``after``: what is queued on a device behind them."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        result: list[Tensor],
        after: StreamOrder | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._works = works
        self._after = after

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for each; ``timeout`` is for each by itself. Raises the first error."""
        try:
            for work in self._works:
                if timeout:
                    work.wait(timeout)
                else:
                    work.wait()
        except LossyError:
            for streams in self.streams:  # what was queued ahead still comes
                streams.order_current()
            raise
        if self._after is not None:
            self._after.order_current()
        return True

    def wait_on_host(self) -> None:
        for work in self._works:
            getattr(work, "wait_on_host", work.wait)()  # another backend's has none
        if self._after is not None:
            self._after.end.wait()

    def wait_result(self) -> None:
        for work in self._works:
            getattr(work, "wait_result", work.wait)()

    def _make_future(self) -> Future:
        """A future with the result of all; raises the first error."""
        result, (future, settle) = self._result, _promise(self.streams)

        def resolve(done: torch.futures.Future[list[Future]]) -> None:
            value: Any = result
            try:
                for one in done.value():
                    one.value()  # raises the first error
            except Exception as error:
                value = error
            settle(value)

        torch.futures.collect_all([work.get_future() for work in self._works]).then(resolve)
        return future

    @property
    def streams(self) -> list[StreamOrder]:
        """Streams of works whose tensors lie on a device."""
        if self._after is not None:
            return [self._after]
        found: list[StreamOrder] = []
        for work in self._works:
            if isinstance(work, ManyWork):
                found += work.streams
            elif isinstance(work, EngineWork) and work.streams is not None:
                found.append(work.streams)
        return found

    def is_completed(self) -> bool:
        is_over = self._after is None or bool(self._after.end.is_done())
        return is_over and all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        return next((e for work in self._works if (e := work.exception()) is not None), None)


def _promise(streams: Sequence[StreamOrder]) -> tuple[Future, Callable[[Any], None]]:
    """A future, and what completes it after ``streams``: by a value, or by an error."""
    source: Future = streams[0].layer.future() if streams else torch.futures.Future()

    def settle(value: Any) -> None:
        with contextlib.ExitStack() as after:
            for each in streams:
                after.enter_context(each.after_end())
            source.set_result(value)

    return source.then(value_or_raise), settle


def value_or_raise(source: Future) -> Any:
    """The value that a future was set to, for its ``then``. DDP sees an error that is raised there;
    one that is set would look like success."""
    value = source.value()
    if isinstance(value, BaseException):
        raise value
    return value


def is_memory(error: BaseException) -> bool:
    """True if ``error`` says that there is not enough memory: Python's, torch's or the engine's."""
    if isinstance(error, LossyError):
        return isinstance(error, EngineError) and error.code == Code.MEMORY
    lacks = "allocate memory", "out of memory", "pinned memory can't be had"
    return isinstance(error, MemoryError) or any(lack in str(error) for lack in lacks)


def not_submitted(endpoint: Endpoint, call: Collective, error: Exception) -> LossyError:
    """Makes what keeps this rank from submitting a call the failure of all ranks. The others would
    wait in vain for this rank to take part."""
    health = endpoint.health
    text = f"{health.where}: {call.numbered}"
    if is_memory(error):
        failure = EngineError(f"{text}: no memory for it: {reason_of(error)}", code=Code.MEMORY)
    else:
        what = f"{type(error).__name__}: {reason_of(error)}"
        failure = EngineError(f"{text}: this rank couldn't submit it: {what}")
    endpoint.fail(call, failure)
    first = health.failure or failure
    return failure if first is failure else first.again(call.numbered)


def reason_of(cause: Exception) -> str:
    return (str(cause).splitlines() or [""])[0] or type(cause).__name__


class Coalescing(threading.local):
    """The works since the manager was opened, for each thread by itself.

    What another thread posts meanwhile isn't the manager's: leaving the manager would wait for it,
    and it might need what comes after.
    """

    def __init__(self) -> None:
        self._works: list[dist.Work] | None = None

    def begin(self) -> None:
        """From now on this thread's works are kept."""
        self._works = []

    def end(self) -> dist.Work:
        """One work for all of this thread since ``begin``."""
        works, self._works = self._works or [], None
        # Another backend's work tells its result when it is done.
        own = [work for work in works if isinstance(work, LossyWork)]
        return ManyWork(works, [tensor for work in own for tensor in work.result()])

    def add(self, work: dist.Work) -> dist.Work:
        """Every work goes through here; returns it."""
        if self._works is not None:
            self._works.append(work)
        return work


# ---- DDP's builtin hooks ----

# Only TorchScript makes a future of a list of tensors that something else completes. It compiles
# these by their source, with names that it knows. It has no streams, so it won't do for a device.
SOURCE: Final = """
def given(future: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(future)
    return tensors

def typed(future: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(given, future, tensors)
"""


def asked_by_hook(tensors: list[Tensor]) -> bool:
    """True if the caller's caller is C++ within a backward pass, as DDP's builtin hooks are, and
    the tensors are what ``FP16_COMPRESS`` sends."""
    if not all(one.dtype is torch.float16 and not is_served(one) for one in tensors):
        return False
    asking = sys._getframe(1).f_back  # None: a thread of torch's
    return asking is None or asking.f_code is BACKWARD


def typed(future: Future, tensors: list[Tensor]) -> Future:
    """Future of ``tensors``, complete when ``future`` is; a RuntimeError quotes its error."""
    typed: Future = _compiled().typed(future, tensors)
    return typed


@functools.cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.CompilationUnit(SOURCE)


# Neither the group nor its works hear of the hook. A call in float16 may be plain DDP's as well.
_register: Final[Any] = DistributedDataParallel._register_builtin_comm_hook


@functools.wraps(_register)
def _checked(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
    compresses = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
    for one in self.parameters() if compresses else ():
        if is_served(one) and self.process_group._get_backend(one.device).name() == "lossy":
            raise UnsupportedError(
                f"DDP's builtin hook FP16_COMPRESS doesn't work over lossy with parameters on "
                f"{one.device}: it reads a C++ list of tensors, and futures of tensors on a "
                f"device hold a Python object; register torch's fp16_compress_hook by "
                f'register_comm_hook, or make the group with lossycoll.Options(wire="bf16")'
            )
    _register(self, comm_hook_type)


setattr(DistributedDataParallel, _register.__name__, _checked)

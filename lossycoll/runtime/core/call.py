"""Calls and operations: what a rank was asked to do, and what became of it in the engine."""

from __future__ import annotations

import time
from _thread import RLock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from lossycoll.errors import ClosedError, EngineError, LossyError, OperationTimeout
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import Code, Where, with_article
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.engine.reports import Report, Stream

LONGEST: Final = timedelta(days=10_000)
"""More (timedelta.max, say) would overflow the nanoseconds of whoever waits."""
ASK_SECONDS: Final = (0.3, 1.0)
"""A wait that takes longer than the first asks the other ranks about its call, and then again."""


def bounded(timeout: timedelta) -> timedelta:
    """``timeout``, or what can be waited for: torch's own arithmetic makes the largest negative."""
    return min(timeout, LONGEST) if timeout > timedelta(0) else LONGEST


CallKey = tuple[str, object, int, object, str]
"""Name, dtype, elements, detail, delivery."""


@dataclass(slots=True, eq=False, repr=False)
class Collective:
    """One call, as the other ranks must issue it too. The text is made only when it is needed."""

    name: str
    dtype: object = None
    elements: int = -1
    detail: object = ""
    delivery: str = ""  # empty for what is reliable and not encoded
    seq: int = -1  # its number in the group, once it is issued; point to point has none
    operations: int = 1  # how many it takes
    submitted: int = 0  # how many of them were submitted; -1: unknown
    last_op: int = -1  # the number of the last one that the engine was given; -1: none

    @property
    def key(self) -> CallKey:
        return self.name, self.dtype, self.elements, self.detail, self.delivery

    def __str__(self) -> str:
        return text_of(self.key)

    @property
    def numbered(self) -> str:
        return f"call #{self.seq} {self}" if self.seq >= 0 else with_article(str(self))


def text_of(key: CallKey) -> str:
    """A call as errors name it, and as all ranks must mean it."""
    text, dtype, elements, detail, delivery = key
    if dtype is not None:
        text += " " + str(dtype).removeprefix("torch.")
    if elements >= 0:
        text += f"[{elements}]"
    detail = getattr(detail, "name", detail)  # an enum's, or as it is
    if detail != "":
        text += " " + str(detail).removeprefix("torch.")
    return f"{text} ({delivery})" if delivery else text


Observer = Callable[[Report, Sequence[Stream]], None]
"""Takes a finished operation's report and its streams."""


@lru_cache(maxsize=64)
def lossy_text(options: Options) -> str:
    """Delivery of a lossy call as ranks compare it: what differs, their errors name."""
    code, most_parity, missing = options.recovery
    said = ["lossy"]
    if options.repair or options.by_parity_alone:
        said.append(f"repair {options.repair}")
    if missing >= 0:
        said.append(f"max_missing {missing:g}")
    if isinstance(options.fec, str):
        said.append(f"fec {options.fec}")
    elif code.rows or (missing >= 0 and not most_parity):
        said.append(f"fec {code.rows}/{code.size}" if code.rows else "fec 0")
    if options.estimator != "count":
        said.append(f"estimator {options.estimator}")
    return ", ".join(said)


class CallOptions(NamedTuple):
    """Options of one call.

    ``options``: the group's, as the caller's scope changes them. ``mean`` or sum. ``timeout`` in
    seconds for ranks that never take part; None: the group's. ``keep``: whatever owns the buffers,
    held until the operation is done. ``epilogue``: run on success, before it counts as done.
    ``among``: an epilogue for what can do without the parts of ranks that are lost; it is given
    the ranks that took part. ``future``: the caller may never wait, so it completes by itself.
    ``encoding``: how packets carry float32, a name of plan.codec's. ``gate``: address of the gate
    that holds the operation back until its input is there (engine/gates.py); 0: it is there.
    ``on_device``: a group of one rank, whose caller has copied what is to be copied. ``observe``:
    is given what the engine says of the operation when it is done.
    """

    options: Options
    mean: bool = True
    timeout: float | None = None
    keep: object = None
    epilogue: Callable[[], None] | None = None
    among: Callable[[Sequence[int]], None] | None = None
    future: bool = False
    encoding: str = "same"
    gate: int = 0
    on_device: bool = False
    observe: Observer | None = None

    @property
    def lossy(self) -> bool:
        return self.options.delivery == "lossy"

    @property
    def is_ones_own(self) -> bool:
        """True if they hold functions or a gate of one call."""
        return bool(self.epilogue or self.among or self.observe or self.gate or self.on_device)


@dataclass(slots=True, eq=False)
class LongWait:
    """A wait for a call, which asks the other ranks about it from time to time."""

    ask: Callable[[Collective], None]
    call: Collective
    since: float
    pause: float = ASK_SECONDS[0]

    def ask_if_due(self, now: float) -> None:
        if now >= self.since + self.pause:
            self.since, self.pause = now, ASK_SECONDS[1]
            self.ask(self.call)


class Submitter(Protocol):
    """Endpoint as an operation that it submitted needs it."""

    def wait_ticket(self, ticket: int, seconds: float) -> int: ...
    def wait_result(self, operation: Operation, seconds: float) -> int: ...
    def take(self, operation: Operation) -> LossyError | None: ...
    def release(self, operation: Operation) -> None: ...
    def note_waiting(self, call: Collective) -> None: ...
    def where(self, operation: Operation) -> Where: ...


class Operation:
    """One operation that the engine was given. It owns its buffers until it is done.

    The engine's ticket is memory of the engine: it is given back only when the operation is done,
    no thread waits for it, and the engine has handed it to the watcher if it was to (``notify``).
    """

    __slots__ = (
        "_among",
        "_begin",
        "_callbacks",
        "_completing",
        "_endpoint",
        "_epilogue",
        "_lock",
        "_long_wait",
        "_released",
        "_waiters",
        "blocks",
        "call",
        "code",
        "done",
        "error",
        "exact",
        "gated",
        "keep",
        "members",
        "notify",
        "observe",
        "shown",
        "steady",
        "ticket",
        "timeout",
    )

    def __init__(
        self, endpoint: Submitter, call: Collective, call_options: CallOptions, timeout: float
    ) -> None:
        self._endpoint = endpoint
        self._epilogue = call_options.epilogue
        self._among = call_options.among
        self.keep = call_options.keep
        self._lock = RLock()  # a signal's handler may come on top of who has it
        self._completing = False
        self._callbacks: list[Callable[[], None]] = []
        self._begin = time.monotonic()
        self._long_wait: LongWait | None = None  # most calls don't take long
        self._waiters = 0
        self._released = False
        self.call = call
        self.timeout = timeout
        self.ticket = 0
        self.code: int = Code.PENDING
        """Code of the last wait; PENDING too where nobody has waited."""
        self.notify = False
        self.exact = False
        """Whether data that a rank's death left out makes it fail."""
        self.blocks: Blocks | Contributions | None = None
        """Fate of single packets, for calls that are to know."""
        self.members: Sequence[int] = (0,)
        self.shown = False
        """Whether the result is there, though the operation need not be done."""
        self.gated = bool(call_options.gate)
        """Whether it waits behind a gate."""
        self.observe = call_options.observe
        self.steady: object = None
        """What the engine was told, where all calls like this tell it the same."""
        self.done = False
        self.error: LossyError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Returns when done; raises its error, or OperationTimeout after ``timeout`` seconds. After
        a timeout the operation goes on, and its buffers still belong to it."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.poll(0.1 if end is None else end - time.monotonic()):
            now = time.monotonic()
            if end is not None and now >= end:
                where = self._endpoint.where(self)
                raise OperationTimeout(f"{where}: not done after the {timeout:g} s given to wait()")
            self.ask_if_due(now)
        if self.error is not None:
            raise self.error.again(self.call.numbered)

    def poll(self, seconds: float = 0.0, *, result: bool = False) -> bool:
        """True if it is done, after at most ``seconds`` (and a tenth). ``result``: or its result is
        there."""
        with self._lock:
            if self.done or (result and self.shown):
                return True
            self._waiters += 1
        code: int = Code.PENDING
        try:
            if result:
                code = self._endpoint.wait_result(self, seconds)
                self.shown = self.shown or code == Code.OK
            else:
                code = self._endpoint.wait_ticket(self.ticket, max(0.0, seconds))
        except ClosedError:
            code = Code.CLOSED
        finally:
            with self._lock:
                self._waiters -= 1
        if code != Code.PENDING and not (result and code == Code.OK):
            self.code = code
            self.complete()
        elif self.done:
            self._retire()
        return self.done or (result and self.shown)

    def wait_result(self) -> None:
        """Returns when the result is there, which may be a round trip before :meth:`wait` would:
        what this rank sends may still be asked for. So its buffers may be read from now on, and
        belong to the operation until it is done. Where what arrives isn't the result yet (it is
        copied, or rests on all ranks' being there to the end), this is :meth:`wait`."""
        if not self._has_result_first:
            self.wait()
            return
        while not self.poll(0.1, result=True):
            self.ask_if_due(time.monotonic())
        if not self.shown and self.error is not None:
            raise self.error.again(self.call.numbered)

    @property
    def _has_result_first(self) -> bool:
        later = self._epilogue is not None or self._among is not None or self.exact
        return not later and (self.blocks is None or not self.blocks.feedback)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when done: at once, or from the thread that finds it done."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def ask_if_due(self, now: float) -> None:
        """Asks the other ranks about this call if it takes long."""
        if self.done:
            return
        if self._long_wait is None:
            self._long_wait = LongWait(self._endpoint.note_waiting, self.call, self._begin)
        self._long_wait.ask_if_due(now)

    def be_handed_over(self, notify: Callable[[int], None]) -> None:
        """Has ``notify`` ask the engine to name the ticket to the watcher, unless that is asked for
        or the operation is done."""
        with self._lock:
            if self.done or self.notify:
                return
            self.notify = True
        notify(self.ticket)

    def handed_over(self) -> None:
        """The engine has named the finished ticket to the watcher, and so forgotten it."""
        self.notify = False
        self.complete()

    def complete(self) -> None:
        """Takes the result of the finished ticket; of several threads the first does. A signal's
        handler that has interrupted that leaves it to what it has interrupted."""
        callbacks: list[Callable[[], None]] = []
        with self._lock:
            if self._completing:
                return
            if not self.done:
                self._completing = True
                try:
                    self.error = self._endpoint.take(self)
                    if self.error is None and (self._epilogue or self._among):
                        self._store()
                    self._epilogue = self._among = self.keep = None
                    self.done = True
                finally:
                    self._completing = False
                callbacks, self._callbacks = self._callbacks, []
        self._retire()
        for callback in callbacks:
            callback()

    def _store(self) -> None:
        try:
            if self._epilogue is not None:
                self._epilogue()
            if self._among is not None:
                self._among(self.members)
        except LossyError as error:
            self.error = error
        except Exception as error:
            where = self._endpoint.where(self)
            self.error = EngineError(f"{where}: the result can't be stored: {error}")

    def _retire(self) -> None:
        with self._lock:
            if self._released or self._waiters or self.notify or not self.done:
                return
            self._released = True
        self._endpoint.release(self)

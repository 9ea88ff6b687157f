"""The one pipeline of a collective: checks the description, chooses the route once, submits.

Nothing that may rightly differ between ranks decides a route: all of them must take the same.

A call like one before is served by what was decided then. After computing, the pipeline's own code
and data have left the caches, and walking through them takes longer than sending 256 KiB. So each
step of Python counts in :meth:`Dispatcher.run_again`.

Long because the pipeline is one file.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from lossycoll.devices.layer import DeviceError
from lossycoll.errors import AbortedError, LossyError, PeerLostError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import Scope, carry_by, scope, within
from lossycoll.plan import codec
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.operations import Steady
from lossycoll.runtime.core.call import CallOptions, Collective, Operation, lossy_text
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.binding import SLICE_SECONDS

from . import checks, spans
from .collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, submit_barrier
from .description import (
    CollectiveKind,
    Description,
    Loss,
    Rounding,
    Staged,
    Submission,
    call_options,
    is_gathered,
)
from .device_wire import DeviceWire
from .devices import ServedDevices
from .on_device import Lanes, OnDevice
from .reduction import Reduction, resolve
from .staging import NOTHING, gathered, then, widened
from .tensors import DTYPES, ENCODED_DTYPES, LOSSY_DTYPES, WIDER, apart, is_plain
from .work import BACKWARD, Coalescing, EngineWork, ManyWork, is_memory, not_submitted

OWN_FILES: Final = str(Path(__file__).parents[1])
OPERATORS: Final = torch._ops.__file__
FORWARD: Final = torch.nn.Module._call_impl.__code__
"""Code of the frames by which a forward is recognized."""
NO_SPAN: Final = contextlib.nullcontext()
SCOPE_KEY: Final = "lossycoll_scope"
_torch: Any = torch._C  # its stub lacks half of what is used here


@lru_cache(maxsize=64)
def reliable_version(options: Options) -> Options:
    """The same options with nothing given up."""
    return within(options, Scope((("delivery", "reliable"),), lossy_copies=False))


@lru_cache(maxsize=64)
def determined(options: Options) -> Options:
    """The same options with sums in the order of ranks."""
    return within(options, Scope((("deterministic", 1),), lossy_copies=False))


def choose(
    call: Description,
    reduction: Reduction | None,
    options: Options,
    around: Scope | None,
) -> CallOptions:
    """Options of a call: how it is delivered, and how packets carry its floats.

    It may lose packets if delivery is ``"lossy"``, the engine can form the reduction (its dtype and
    operation), and the kind of call, its size and the scope around it admit losses. From here on
    the delivery of its options is the call's.
    """
    encoding = _encoding(call, options, around)
    if is_gathered(call.kind, reduction):
        return CallOptions(reliable_version(options), encoding=codec.phases(encoding)[0])
    loss, may_lose = call.kind.loss, call.nbytes >= options.lossy_min_bytes
    if loss is Loss.COPY:
        lossy_scope = around is not None and around.lossy_copies
        may_lose &= lossy_scope and call.writes[0].dtype in LOSSY_DTYPES
    elif loss is not Loss.REDUCTION:
        may_lose = loss is Loss.DELIVERY
    if options.delivery == "lossy" and not may_lose:
        options = reliable_version(options)
    return CallOptions(options, encoding=encoding)


def adds_activations() -> bool:
    """True if the present call adds activations up, by where it comes from.

    An operator of ``torch.ops`` is a functional collective, which DTensor calls. Sums in a module's
    forward are activations as well, those in a backward pass within it are not: DDP's, FSDP's and
    their hooks'. Code that was compiled to C++ as a whole can't be told from its caller.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == OPERATORS:
        return True
    while frame is not None and frame.f_code is not BACKWARD:
        if frame.f_code is FORWARD:
            return True
        frame = frame.f_back
    return False


def _encoding(call: Description, options: Options, around: Scope | None) -> str:
    when = call.kind.rounding
    if when is Rounding.CALL:
        return call.encoding
    if options.wire == "same" or when is Rounding.NEVER:
        return "same"
    if when is Rounding.SCOPE and (around is None or not around.sets("wire")):
        return "same"
    few_bits = options.wire in codec.FEW_BITS
    if call.dtype not in ENCODED_DTYPES and not (few_bits and call.dtype in WIDER):
        return "same"
    # Where ranks don't know each other's sizes, sizes can't decide.
    large = call.splits is not None or call.nbytes >= options.lossy_min_bytes
    if not large:
        return "same"
    # What is only copied is like the means that an all-reduce gathers.
    return options.encoding if call.op is not None else codec.phases(options.encoding)[1]


def _stash(scope: Scope | None) -> None:
    """Hands a scope to autograd's threads, which compute gradients on devices for who called
    backward(): torch hands them what was stashed in what it calls thread-local state."""
    _torch._stash_obj_in_tls(SCOPE_KEY, scope)


def _stashed() -> Scope | None:
    """The scope of the thread that this one works for; None in threads that Python has started.
    Those have contexts of their own: what is stashed there may be of another task."""
    if not _torch._is_key_in_tls(SCOPE_KEY):
        return None
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    found: Scope | None = _torch._get_obj_in_tls(SCOPE_KEY)
    return found


carry_by(_stash, _stashed)


class Known(NamedTuple):
    """A call that the pipeline has served."""

    asked: Options  # The group's then
    choice: CallOptions  # The call's options and encoding
    named: Collective  # The call as ranks compare it
    reduction: Reduction | None  # What it asked for; None: a copy
    harmless_overlap: int | None  # Of its description
    steady: Steady | None  # What the engine is told; None: the plan of each is another
    timeout: timedelta  # torch's option


REPEATED: Final = (ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER)
"""Kinds of calls that :class:`Dispatcher` knows again."""
MOST_KNOWN: Final = 256
"""Calls that a group remembers."""


class Dispatcher:
    """The pipeline of one group. ``devices``: which devices the group serves."""

    def __init__(self, endpoint: Endpoint, devices: ServedDevices) -> None:
        self.endpoint: Final = endpoint
        self.health: Final = endpoint.health
        self.where: Final = self.health.where
        self._group_failure = endpoint.operations.group_failure
        self.fail: Final = endpoint.fail
        self._options = endpoint.options
        self._says_lossy = endpoint.options.is_given("delivery")
        self._told: set[str] = set()
        self._asked: list[tuple[int | None, float | None]] = []
        self.coalescing: Final = Coalescing()
        self.lanes: Final = Lanes()
        self.device_wire: Final = DeviceWire(endpoint, self.lanes)
        self.devices: Final = devices
        self._known: dict[tuple[object, ...], Known] = {}

    # ---- options ----

    def effective(self) -> Options:
        """The options for a call made now: the group's, as changed by the scope around it."""
        around, options = scope(), self._asked_options()
        return options if around is None else within(options, around)

    def _asked_options(self) -> Options:
        """The group's, as torch's switch changes them where nobody has written otherwise."""
        options = self._options
        if torch.are_deterministic_algorithms_enabled() and not options.is_given("deterministic"):
            return determined(options)
        return options

    def recover(self, repair: int | None, max_missing: float | None) -> Callable[[], None]:
        """Brings back as much as is asked for from now on, of what is lossy.

        Whoever made the group goes first: rounds don't count where ``repair`` was set, a share
        doesn't where ``max_missing``, ``repair`` or ``fec`` was. All ranks must call this, and what
        it returns, between the same calls.
        """
        made = self.endpoint.options
        means = made.is_given("repair") or made.is_given("fec") or made.is_given("max_missing")

        def change(what: Callable[[tuple[int | None, float | None]], None]) -> None:
            what((repair, max_missing))
            rounds = [one for one, _ in self._asked if one is not None]
            shares = [one for _, one in self._asked if one is not None]
            changes: dict[str, Any] = {}
            if rounds and not made.is_given("repair"):
                changes["repair"] = max(rounds)
            if shares and not means:
                changes["max_missing"] = min(shares)
            self._options = replace(made, **changes) if changes else made

        change(self._asked.append)
        return lambda: change(self._asked.remove)

    # ---- the pipeline ----

    def run(self, call: Description, opts: Any) -> dist.Work:
        return self.coalescing.add(self._serve(call, self.check(call), opts))

    def run_again(
        self, kind: CollectiveKind, source: Tensor, target: Tensor, what: object, opts: Any
    ) -> dist.Work | None:
        """Serves a call like one before, if there is one. ``what``: its operation, or its root."""
        sizes = source.numel(), target.numel()
        known = self._known.get((kind, what, opts.asyncOp, source.dtype, target.dtype, sizes))
        if known is None or known.asked is not self._asked_options() or not is_plain(source):
            return None
        if known.steady is not None and known.timeout != opts.timeout:
            return None
        if profiler._is_profiler_enabled or scope() is not None:
            return None
        if target is not source and not (
            is_plain(target) and apart(source, target, known.harmless_overlap) is source
        ):
            return None
        if known.choice.options.delivery == "lossy" and self._is_exact(kind):
            return None
        named = known.named
        call = Collective(named.name, named.dtype, named.elements, named.detail)
        call.delivery = named.delivery
        address = source.data_ptr()
        operation: Operation | None
        try:
            if known.steady is None:
                # An all-reduce, whose owners are in another order each time.
                given = call_options(known.choice, opts, Staged(source, source), known.reduction)
                self.health.issue(call)
                operation = self.endpoint.all_reduce(
                    *(call, address, source.numel(), DTYPES[source.dtype]), given
                )
            else:
                buffers = address, target.data_ptr()
                operation = self.endpoint.operations.submit_again(
                    *(known.steady, call, buffers), (source, target)
                )
        except BaseException as error:
            self._recover(call, error)
            raise
        if operation is None:  # it isn't quite like that one, and nothing was done
            return None
        work = self.coalescing.add(EngineWork(self.endpoint, operation, [target]))
        if not opts.asyncOp:
            # The caller is about to wait. Begun here, that takes fewer steps of Python, each of
            # which takes microseconds after computing. What a handler raises is the caller's.
            operation.poll(SLICE_SECONDS)
        return work

    def _serve(self, call: Description, reduction: Reduction | None, opts: Any) -> dist.Work:
        around, options = scope(), self._asked_options()
        repeated = around is None and call.kind in REPEATED
        if around is None:
            choice = choose(call, reduction, options, None)
            if choice.lossy and self._is_exact(call.kind):
                choice = choose(call, reduction, reliable_version(options), None)
                repeated = False
        else:
            options = within(options, around)
            choice = choose(call, reduction, options, around)
        if choice.encoding != "same" and not choice.lossy and call.kind is ALL_REDUCE:
            work = self._encoded_there(call, choice.encoding, reduction, opts)
            if work is not None:
                return work
        if choice.options.deterministic and choice.lossy:
            by_torch = torch.are_deterministic_algorithms_enabled()
            wish = "torch.use_deterministic_algorithms(True)" if by_torch else "deterministic=1"
            self.endpoint.stats.promise(choice.options, wish)
        numbered = self.named(call, choice)
        if choice.encoding != "same" and self.endpoint.topology.one_host:
            asked = choice.options.wire
            self._tell_once(
                "%s: wire=%s changes nothing here: all ranks share a host, where floats travel as "
                "they are; to try an encoding on one host, set LOSSYCOLL_LINK=udp",
                choice.encoding if asked == "same" else asked,
            )
            choice = choice._replace(encoding="same")
        try:
            work = self._by_engine(numbered, call, opts, choice, reduction)
        except BaseException as error:
            self._recover(numbered, error)
            raise
        if repeated and not (choice.options.deterministic and choice.lossy):
            overlap = call.harmless_overlap
            known = Known(options, choice, numbered, reduction, overlap, None, opts.timeout)
            self._remember(call, known, opts.asyncOp, work)
        return work

    def _remember(self, call: Description, known: Known, is_async: object, work: dist.Work) -> None:
        """Has :meth:`run_again` find it for calls like this one."""
        if type(work) is not EngineWork or work.streams is not None or not call.nbytes:
            return
        reduction = known.reduction
        if len(call.reads) != 1 or len(call.writes) != 1 or is_gathered(call.kind, reduction):
            return
        source, target = call.reads[0], call.writes[0]
        if call.compared is not source or call.detail != "" or call.result is not None:
            return  # another caller's kind of call, of the same collective
        steady = work.operation.steady
        if isinstance(steady, Steady):
            known = known._replace(steady=steady)
        elif steady or call.kind is not ALL_REDUCE or known.choice.encoding != "same":
            return  # not even an all-reduce, of which only the order of owners is drawn anew
        if reduction is not None and (reduction.factor is not None or source.dtype not in DTYPES):
            return
        if source.is_complex() or not all(
            self.devices.takes_as_is([tensor]) for tensor in (source, target)
        ):
            return
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        what = call.op.op if call.op is not None else call.root
        sizes = source.numel(), target.numel()
        self._known[call.kind, what, is_async, source.dtype, target.dtype, sizes] = known

    def _tell_once(self, text: str, value: str) -> None:
        if text not in self._told and self.where.rank == 0:
            log.info(text, self.where, value)
        self._told.add(text)

    def _is_exact(self, kind: CollectiveKind) -> bool:
        """True if a sum is of activations, as far as can be seen, and nobody has said that it may
        lose packets (docs/backend.md)."""
        if kind.loss is not Loss.REDUCTION or self._says_lossy or not adds_activations():
            return False
        self._tell_once(
            "%s: %s in a module's forward or by torch.ops (DTensor, torch.compile) adds "
            "activations up and is reliable; with lossycoll.lossy() around it, or "
            "Options(delivery='lossy'), it may lose packets",
            kind.name,
        )
        return True

    def _encoded_there(
        self, call: Description, encoding: str, reduction: Reduction | None, opts: Any
    ) -> dist.Work | None:
        wire = self.device_wire
        if not call.on_device or not wire.serves(call, encoding, reduction):
            return None
        assert reduction is not None
        before = self.endpoint.operations.sequencer.next
        try:
            return wire.all_reduce(
                *(call, encoding, reduction), lambda part: self._serve(part, self.check(part), opts)
            )
        except BaseException as error:
            # As in _recover(): errors raised in one of the two calls are handled by now, but not
            # what was raised between them.
            handled = isinstance(error, LossyError) and not isinstance(error, DeviceError)
            is_error = isinstance(error, Exception)
            if handled or (not is_error and self.endpoint.operations.sequencer.next == before):
                raise  # the latter: interrupted, and nothing was submitted
            named = self.named(call)
            self.health.issue(named)
            if isinstance(error, Exception):
                raise not_submitted(self.endpoint, named, error) from error
            self.fail_halfway(named, error)
            raise

    def run_all(self, calls: Sequence[Description], opts: Any) -> dist.Work:
        """Serves several calls as one work. If one of them is refused, none is made."""
        checked = [(call, self.check(call)) for call in calls]
        works = [
            self.coalescing.add(self._serve(call, reduction, opts)) for call, reduction in checked
        ]
        return ManyWork(works, [tensor for call in calls for tensor in call.filled])

    def check(self, call: Description) -> Reduction | None:
        """Refuses what can't be served; returns what the call reduces by."""
        name, reads, writes = call.kind.name, call.reads, call.writes
        if reads is not writes or call.root is not None or not self.devices.takes_as_is(writes):
            checks.check_readable(self.where, name, writes)
            if reads is not writes:
                checks.check_readable(self.where, name, reads)
            checks.check_writable(self.where, name, writes)
            self.devices.check(name, writes if reads is writes else [*reads, *writes])
            if call.root is not None and not 0 <= call.root < self.where.world:
                raise checks.refusal(self.where, name, f"root {call.root} in")
        return None if call.op is None else resolve(self.where, name, writes[0].dtype, call.op)

    def _recover(self, call: Collective, error: BaseException) -> None:
        """Keeps the numbers and operations of the ranks together when a call raises.

        An interrupted call of which nothing was submitted leaves no trace: it can be made again.
        One that was submitted continues. Any other call fails the group, and so reaches all ranks:
        with a hole in one rank's numbers, later calls would take the data of others.
        """
        own = isinstance(error, DeviceError)
        if isinstance(error, LossyError) and not own and not is_memory(error):
            # All ranks refuse alike what needs the data of a lost one.
            if call.seq >= 0 and not isinstance(error, PeerLostError):
                if self.health.failure is None and (cause := self._group_failure(call)):
                    raise cause.again(call.numbered) from None
                self.fail(call, error)
        elif isinstance(error, Exception):
            if call.seq < 0:
                self.health.issue(call)
            raise not_submitted(self.endpoint, call, error) from error
        elif call.seq >= 0 and call.submitted != call.operations:
            if not call.submitted and self.health.take_back(call):
                return
            self.fail_halfway(call, error)

    def fail_halfway(self, call: Collective, error: BaseException) -> None:
        """Fails the group by a call of which the other ranks may have got a part."""
        text = f"{self.where}: {call.numbered} was interrupted halfway ({error!r})"
        self.fail(call, AbortedError(text, peer=self.where.rank))

    def named(self, call: Description, choice: CallOptions | None = None) -> Collective:
        """A checked call as other ranks must issue it, without a number yet. ``choice``: how it is
        served; None: exactly."""
        compared = call.compared
        if compared is None:
            named = Collective(call.kind.name, detail=call.agreed)
        else:
            named = Collective(call.kind.name, compared.dtype, compared.numel(), call.agreed)
        named.operations = call.kind.operations
        # A rank whose tensors aren't on one takes other routes.
        said = ["on a device"] if call.on_device else []
        if choice is not None and choice.lossy:
            said.append(lossy_text(choice.options))
        if choice is not None and choice.encoding != "same":
            said.append(f"wire {choice.encoding}")
        named.delivery = ", ".join(said)
        return named

    def _by_engine(
        self,
        numbered: Collective,
        call: Description,
        opts: Any,
        choice: CallOptions,
        reduction: Reduction | None,
    ) -> dist.Work:
        submit, carried, narrow = call.kind.submit, call, None
        gathers = is_gathered(call.kind, reduction)
        if choice.encoding != "same" and call.dtype in WIDER:
            carried, narrow = widened(call)
            reduction = reduction and resolve(self.where, call.kind.name, carried.dtype, call.op)
        if not call.nbytes and call.kind.empty_is_barrier:
            submit, staged = submit_barrier, Staged(NOTHING, NOTHING)
            choice = CallOptions(reliable_version(choice.options))
        elif gathers:
            assert reduction is not None
            submit = call.kind.gathering
            staged = gathered(carried, reduction, self.where.rank, self.where.world)
        else:
            staged = call.kind.stage(carried, reduction, choice.lossy)
        assert submit is not None
        fills = not gathers or call.root in (None, self.where.rank)
        if narrow is not None and fills:
            staged = then(staged, narrow)
        on_device = None
        if call.on_device and (call.nbytes or call.splits is not None):
            on_device = OnDevice(self.endpoint, self.lanes, carried)
        try:
            if on_device is not None:
                keeps = choice.lossy or choice.options.continues
                divides = call.kind.divides and staged.among is None
                staged = on_device.begin(staged, keeps=keeps, divides=divides)
            span = None
            if profiler._is_profiler_enabled:
                span = spans.Span(self.where.group, numbered, call.reads, call.nbytes)
            given = call_options(
                choice, opts, staged, reduction, None if span is None else span.observe
            )
            s = Submission(
                *(self.endpoint, numbered, carried, staged.source, staged.target, given),
                self.health,
            )
            if on_device is not None:
                numbered.operations *= on_device.pieces
            self.health.issue(numbered)  # after all that may take long or fail for want of memory
            with NO_SPAN if span is None else span:
                submitted = submit(s) if on_device is None else on_device.submit(submit, s)
            operations = (submitted,) if isinstance(submitted, Operation) else submitted
            if span is not None:
                span.ends_with(operations)
            works = [call.kind.work(self.endpoint, each, call.filled) for each in operations]
            if on_device is not None:
                return on_device.submitted(works, operations)
            return works[0] if len(works) == 1 else ManyWork(works, call.filled)
        except BaseException:
            if on_device is not None:
                on_device.give_up(submitted=numbered.submitted == numbered.operations)
            raise

    def issue(self, call: Collective) -> None:
        """Numbers a call that no operation serves, unless the engine has failed by now."""
        if cause := self._group_failure(call):
            raise cause.again(call.numbered)
        self.health.issue(call)

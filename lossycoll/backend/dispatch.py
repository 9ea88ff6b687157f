"""Which way a call takes, and what is refused.

Nothing that may rightly differ between ranks decides the way: all of them must take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import UnsupportedError
from lossycoll.options.fields import Options, Scope, scope, within
from lossycoll.runtime.collectives.endpoint import Communicator
from lossycoll.runtime.collectives.single_rank import Alone
from lossycoll.runtime.core.call import LONGEST, Collective, Operation, Terms

from .tensors import (
    AVG,
    DTYPES,
    GLOO_DTYPES,
    PREMUL_SUM,
    SUM,
    contiguous,
    local_reduction,
    nbytes,
    overlaps_itself,
    scaled,
    spread,
)
from .work import EngineWork, GlooWork, ManyWork

_c10d: Any = c10d  # its stub lacks half of what is used here
Tensors = list[Tensor]


@dataclass(frozen=True)
class Reduction:
    """``op`` of contributions that each rank first multiplies by its ``factor``, if it has one.

    ``native``: whether the engine can form it; ``local`` does without, of shape (world, ...) to
    (...).
    """

    op: object
    native: bool
    local: Callable[[Tensor], Tensor]
    factor: float | None = None

    def over(self, rows: Tensor, members: Sequence[int]) -> Tensor:
        """The result from one contribution per rank, of which only those of ``members`` count.

        A sum of floats stands for all ranks, as the engine's does: the mean over those that are
        left times the world.
        """
        if len(members) == len(rows):
            return self.local(rows)
        result = self.local(rows[list(members)])
        return result * (len(rows) / len(members)) if self.native and self.op == SUM else result

    def contribution(self, tensor: Tensor) -> Tensor:
        """``tensor`` with its elements in order in memory; itself where that is so already."""
        return scaled(tensor, self.factor)


class Routes:
    """The decisions for one group. ``opts`` are always torch's options of the call."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._health = communicator.health
        self._options = communicator.options
        self._asked_rounds: list[int] = []
        self.operations: Communicator | Alone = (
            communicator if communicator.world > 1 else Alone(communicator.health)
        )
        self._coalesced: list[dist.Work] | None = None

    def issue(
        self,
        name: str,
        tensors: Tensors,
        shape: Tensor | None = None,
        detail: object = "",
        options: Options | None = None,
    ) -> Collective:
        """Checks the tensors and numbers the call.

        ``shape`` is the tensor whose size and dtype all ranks must agree on; ``options`` are those
        of an operation by the engine.
        """
        self.check_device(name, tensors)
        if shape is None:
            call = Collective(name, detail=detail)
        else:
            call = Collective(name, shape.dtype, shape.numel(), detail)
        if options is not None and options.delivery == "lossy":
            call.delivery = f"lossy, repair {options.repair}" if options.repair else "lossy"
        self._health.issue(call)
        return call

    def resend(self, rounds: int) -> Callable[[], None]:
        """From now on what is lossy is resent in at least so many rounds, unless the group's maker
        has said how many. Returns what takes that back. All ranks must call both between the same
        calls."""
        made = self._communicator.options
        if made.is_given("repair"):
            return lambda: None

        def change(what: Callable[[int], None]) -> None:
            what(rounds)
            self._options = replace(made, repair=max(made.repair, *self._asked_rounds, 0))

        change(self._asked_rounds.append)
        return lambda: change(self._asked_rounds.remove)

    def effective(self) -> Options:
        block = scope()
        return self._options if block is None else within(self._options, block)

    def reducing(self, size: int, reduction: Reduction) -> Options:
        """The options for a reduction of ``size`` bytes by the engine."""
        options = self.effective()
        lossy = reduction.native and self._may_be_lossy(size)
        return options if lossy else reliable_version(options)

    def all_reducing(self, dtype: torch.dtype, size: int, reduction: Reduction) -> Options | None:
        """The same where gloo may do it, too: then None. Of its other reductions one crashes, one
        fills the tensors of all ranks, and some lose what is not a number."""
        if reduction.native and self._may_be_lossy(size):
            return self.effective()
        return self.exact(dtype, size, by_gloo=reduction.native and reduction.factor is None)

    def copying(self, dtype: torch.dtype, size: int) -> Options | None:
        """The same for a copy. Only a block of ``lossy()`` makes copies lossy, and only floats."""
        block = scope()
        asked = block is not None and block.lossy_copies and dtype in DTYPES
        if asked and self._may_be_lossy(size):
            return self.effective()
        return self.exact(dtype, size)

    def exact(self, dtype: torch.dtype, size: int, *, by_gloo: bool = True) -> Options | None:
        """The same for what is never lossy. ``by_gloo``: whether gloo can do it at all."""
        options = self.effective()
        small = 0 < size < options.bulk_min_bytes and self._communicator.world > 1
        return None if small and by_gloo and dtype in GLOO_DTYPES else reliable_version(options)

    def _may_be_lossy(self, size: int) -> bool:
        options = self.effective()
        return options.delivery == "lossy" and size >= options.lossy_min_bytes

    def by_gloo(
        self, call: Collective, post: Callable[[Tensors], dist.Work], targets: Tensors
    ) -> dist.Work:
        """``post`` gets what gloo can fill, which takes a strided tensor for a dense one. Where
        that isn't ``targets``, this waits for the result."""
        dense = [contiguous(target) for target in targets]
        # Gloo's own copies are subject to autograd, which has no say in them.
        detached = [buffer.detach() for buffer in dense]
        work = GlooWork(self._communicator, call, post(detached), targets)
        staged = [pair for pair in zip(dense, targets, strict=True) if pair[0] is not pair[1]]
        if staged:
            work.wait()
        for buffer, target in staged:
            spread(buffer, [target])
        return self.noted(work)

    def work(self, operation: Operation, result: Tensors) -> dist.Work:
        return self.noted(EngineWork(self._communicator, operation, result))

    def nothing(self, call: Collective, opts: Any, result: Tensors) -> dist.Work:
        """For tensors without elements: nothing moves, but all ranks must mean the same."""
        return self.work(self.barrier(call, opts), result)

    # ---- works that torch wants as one ----

    def begin_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return ManyWork(works, [tensor for work in works for tensor in work.result()])

    def noted(self, work: dist.Work) -> dist.Work:
        """Every work goes through here, so that ``end_coalescing`` has those since the begin."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def terms(
        self,
        options: Options,
        opts: Any,
        keep: object,
        epilogue: Callable[[], None] | None = None,
        *,
        op: object = AVG,
        among: Callable[[Sequence[int]], None] | None = None,
    ) -> Terms:
        seconds = min(opts.timeout, LONGEST).total_seconds()
        return Terms(
            options=options,
            mean=op == AVG,
            timeout=seconds if seconds > 0 else None,
            keep=keep,
            epilogue=epilogue,
            among=among,
            future=opts.asyncOp,
        )

    def barrier(self, call: Collective, opts: Any) -> Operation:
        one = torch.ones(1)
        terms = self.terms(reliable_version(self._options), opts, one)
        return self.operations.barrier(call, one.data_ptr(), terms)

    # ---- what is refused, before the call gets a number ----

    def refusal(self, name: str, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._health.where}: {name} got {what} a group of {self._communicator.world} ranks"
        )

    def check_device(self, name: str, tensors: Tensors) -> None:
        """Refuses what the engine can't read as elements in memory, one by one."""
        for tensor in tensors:
            if not tensor.is_cpu:
                raise UnsupportedError(
                    f"{self._health.where}: {name} got a tensor on {tensor.device}, but backend "
                    f"'lossy' serves CPU tensors only so far; copy it with .cpu(), or use a group "
                    f"of another backend for it"
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = tensor.dtype if tensor.is_quantized else tensor.layout
                raise UnsupportedError(
                    f"{self._health.where}: {name} got a tensor of {kind}, but takes dense ones "
                    f"only; make it one with .to_dense() or .dequantize() (all_reduce alone takes "
                    f"torch.sparse_coo as well)"
                )

    def only(self, name: str, tensors: Sequence[Any]) -> Any:
        """The entry of a list that torch's interface leaves room for several in."""
        if len(tensors) != 1:
            raise UnsupportedError(
                f"{self._health.where}: {name} got {len(tensors)} tensors of this rank, but takes "
                f"one at a time"
            )
        return tensors[0]

    def check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self._communicator.world:
            raise self.refusal(name, f"root {root} in")

    def check_dtypes(self, name: str, tensors: Tensors) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            listed = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise self.refusal(name, f"tensors of different types ({listed}) in")

    def check_targets(self, name: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if overlaps_itself(tensor):
                raise UnsupportedError(
                    f"{self._health.where}: {name} can't fill a tensor of shape "
                    f"{tuple(tensor.shape)} and stride {tensor.stride()}, several of whose "
                    f"elements share one place (an expanded one); give it memory of its own with "
                    f".clone()"
                )

    def reduction(self, name: str, dtype: torch.dtype, op: Any) -> Reduction:
        """What torch's ``op`` asks for. Raises UnsupportedError for what can't be done."""
        kind, factor = op.op, None
        if kind == PREMUL_SUM and (dtype.is_floating_point or dtype.is_complex):
            kind, factor = SUM, float(op.factor)
        found = _plain(kind, dtype)
        if found is None:
            raise UnsupportedError(
                f"{self._health.where}: {name} can't form the {kind.name} of {dtype}; it knows "
                f"SUM, PRODUCT, MIN and MAX of floats and integers, AVG and PREMUL_SUM of floats, "
                f"and BAND, BOR and BXOR of integers and bool; convert the tensor first"
            )
        return found if factor is None else replace(found, factor=factor)

    def check_chunks(self, name: str, part: Tensor, whole: Tensor) -> None:
        """``whole`` must be one ``part`` per rank."""
        if part.dtype != whole.dtype or part.numel() * self._communicator.world != whole.numel():
            raise self.refusal(
                name,
                f"{whole.dtype}[{whole.numel()}] whose parts are {part.dtype}[{part.numel()}] in",
            )

    def check_list(self, name: str, tensor: Tensor, parts: Tensors) -> None:
        """``parts`` must be one tensor like ``tensor`` per rank."""
        sizes = {(part.dtype, part.numel()) for part in parts}
        if len(parts) != self._communicator.world or sizes != {(tensor.dtype, tensor.numel())}:
            raise self._bad_list(name, tensor, parts)

    def check_parts(self, name: str, tensor: Tensor, parts: Tensors) -> tuple[int, ...]:
        """``parts`` must be one tensor per rank, and this rank's like ``tensor``.

        Returns the elements of each.
        """
        sizes = tuple(part.numel() for part in parts)
        alike = {part.dtype for part in parts} == {tensor.dtype}
        own = self._communicator.rank
        if len(parts) != self._communicator.world or not alike or sizes[own] != tensor.numel():
            raise self._bad_list(name, tensor, parts)
        return sizes

    def _bad_list(self, name: str, tensor: Tensor, parts: Tensors) -> UnsupportedError:
        listed = ", ".join(f"{part.dtype}[{part.numel()}]" for part in parts[:4])
        return self.refusal(
            name,
            f"{tensor.dtype}[{tensor.numel()}] and a list of {len(parts)} tensors ({listed}) for",
        )

    def check_own(self, send: Sequence[int], receive: Sequence[int]) -> None:
        """What this rank sends itself must be what it expects from itself, in bytes."""
        own = self._communicator.rank
        if send[own] != receive[own]:
            what = f"{send[own]} bytes to itself where it expects {receive[own]}, in"
            raise self.refusal("all_to_all", what)

    def splits(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Bytes per rank; ``sizes``: lengths in the first dimension, or empty for equal parts."""
        world = self._communicator.world
        if not tensor.dim():
            raise self.refusal("all_to_all", "a tensor without dimensions to split for")
        rows = tensor.shape[0]
        if not sizes and rows % world == 0:
            sizes = [rows // world] * world
        if len(sizes) != world or sum(sizes) != rows or min(sizes) < 0:
            raise self.refusal("all_to_all", f"{rows} rows in parts of {list(sizes)} for")
        row = nbytes(tensor) // rows if rows else 0
        return [size * row for size in sizes]


@lru_cache(maxsize=256)
def _plain(kind: object, dtype: torch.dtype) -> Reduction | None:
    """The reduction without a factor; None for what can't be done."""
    local = local_reduction(kind, dtype)
    native = kind in (SUM, AVG) and dtype in DTYPES
    return None if local is None else Reduction(kind, native, local)


@lru_cache(maxsize=64)
def reliable_version(options: Options) -> Options:
    """The same options with nothing given up."""
    return within(options, Scope((("delivery", "reliable"),), lossy_copies=False))

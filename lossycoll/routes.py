"""Which way a call takes, and what is refused.

Nothing that may rightly differ between ranks decides the way: all of them must take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .calls import LONGEST, Collective, Operation, Terms
from .communicator import Communicator
from .errors import UnsupportedError
from .options import Options, Scope, scope, within
from .tensors import AVG, DTYPES, SUM, local_reduction, nbytes, overlaps_itself, plain
from .work import EngineWork, GlooWork

_c10d: Any = c10d  # its stub lacks half of what is used here
Tensors = list[Tensor]


class Routes:
    """The decisions for one group. ``opts`` are always torch's options of the call."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._health = communicator.health
        self._options = communicator.options

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

    def effective(self) -> Options:
        block = scope()
        return self._options if block is None else within(self._options, block)

    def reducing(self, tensor: Tensor, op: object, parts: int = 1) -> Options | None:
        """The options for a reduction by the engine; None: it is gloo's.

        ``tensor`` times ``parts`` is the size that counts.
        """
        if self._communicator.world == 1 or not plain(tensor):
            return None
        options = self.effective()
        size = nbytes(tensor) * parts
        if (
            options.delivery == "lossy"
            and size >= options.lossy_min_bytes
            and tensor.dtype in DTYPES
            and op in (SUM, AVG)
        ):
            return options
        return reliable_version(options) if size >= options.bulk_min_bytes else None

    def copying(self, tensor: Tensor, parts: int = 1) -> Options | None:
        """The same for a copy. Only a block of ``lossy()`` makes copies lossy, and only floats."""
        block = scope()
        if block is not None and block.lossy_copies and tensor.dtype in DTYPES:
            return self.reducing(tensor, SUM, parts)
        return self.exact(tensor, parts)

    def exact(self, tensor: Tensor, parts: int = 1) -> Options | None:
        """The same for what is never lossy."""
        if self._communicator.world == 1 or not plain(tensor):
            return None
        options = self.effective()
        size = nbytes(tensor) * parts
        return reliable_version(options) if size >= options.bulk_min_bytes else None

    def by_engine(self, tensor: Tensor) -> bool:
        """The same where sizes may rightly differ between ranks, so that they can't decide."""
        return self._communicator.world > 1 and tensor.layout is torch.strided

    def by_gloo(
        self, call: Collective, post: Callable[[], dist.Work], result: Tensors
    ) -> dist.Work:
        """Gloo ends the process when ranks disagree on a size. So where it serves what is rare (a
        sparse tensor, an empty one), all ranks first agree on the call; that waits for them."""
        if self._communicator.world > 1 and not self._options.bulk_min_bytes:
            self.barrier(call, _c10d.BarrierOptions()).wait()
        return GlooWork(self._communicator, call, post(), result)

    def work(self, operation: Operation, result: Tensors) -> dist.Work:
        return EngineWork(self._communicator, operation, result)

    def terms(
        self,
        options: Options,
        opts: Any,
        keep: object,
        epilogue: Callable[[], None] | None = None,
        *,
        op: object = AVG,
    ) -> Terms:
        seconds = min(opts.timeout, LONGEST).total_seconds()
        return Terms(
            options=options,
            mean=op == AVG,
            timeout=seconds if seconds > 0 else None,
            keep=keep,
            epilogue=epilogue,
            future=opts.asyncOp,
        )

    def barrier(self, call: Collective, opts: Any) -> Operation:
        one = torch.ones(1)
        terms = self.terms(reliable_version(self._options), opts, one)
        return self._communicator.barrier(call, one.data_ptr(), terms)

    # ---- what is refused, before the call gets a number ----

    def refusal(self, name: str, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._health.where}: {name} got {what} a group of {self._communicator.world} ranks"
        )

    def check_device(self, name: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise UnsupportedError(
                    f"{self._health.where}: {name} got a tensor on {tensor.device}, but backend "
                    f"'lossy' serves CPU tensors only so far; copy it with .cpu(), or use a group "
                    f"of another backend for it"
                )

    def check_targets(self, name: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if overlaps_itself(tensor):
                raise UnsupportedError(
                    f"{self._health.where}: {name} can't fill a tensor of shape "
                    f"{tuple(tensor.shape)} and stride {tensor.stride()}, several of whose "
                    f"elements share one place (an expanded one); give it memory of its own with "
                    f".clone()"
                )

    def reduction(self, name: str, tensors: Tensors, op: Any) -> Callable[[Tensor], Tensor] | None:
        """How to reduce what the engine can't add; None if it can (or gloo shall: sparse)."""
        dtype = tensors[0].dtype
        if (op in (SUM, AVG) and dtype in DTYPES) or tensors[0].layout is not torch.strided:
            return None
        found = local_reduction(op, dtype)
        if found is None:
            raise UnsupportedError(
                f"{self._health.where}: {name} can't form the {op.name} of {dtype}; it knows SUM, "
                f"PRODUCT, MIN and MAX of floats and integers, AVG of floats, and BAND, BOR and "
                f"BXOR of integers and bool; convert the tensor first"
            )
        return found

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
            listed = ", ".join(f"{part.dtype}[{part.numel()}]" for part in parts[:4])
            raise self.refusal(
                name,
                f"{tensor.dtype}[{tensor.numel()}] and a list of {len(parts)} tensors ({listed}) "
                f"for",
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
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % world == 0:
            sizes = [rows // world] * world
        if len(sizes) != world or sum(sizes) != rows:
            raise self.refusal("all_to_all", f"{rows} rows in parts of {list(sizes)} for")
        row = nbytes(tensor) // rows if rows else 0
        return [size * row for size in sizes]


@lru_cache(maxsize=64)
def reliable_version(options: Options) -> Options:
    """The same options with nothing given up."""
    return within(options, Scope((("delivery", "reliable"),), lossy_copies=False))

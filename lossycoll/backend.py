"""torch.distributed's surface: torch's collectives in, communicator and gloo calls out.

Every collective is written out here and none inherited: torch's trampoline keeps the GIL while it
runs an inherited one, which then waits for gloo's thread, which waits for the GIL.
docs/backend.md says which call takes which way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .calls import Collective, Operation, Terms
from .engine import DType
from .errors import AbortedError, UnsupportedError
from .group import Group, Place
from .options import Options, Scope, scope, within
from .figures import Report, Stats
from .work import EngineWork, GlooWork, ManyWork, PointToPointWork

DTYPES: Final = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
}
_c10d: Any = c10d  # its stub lacks half of what is used here, and has overloads we don't serve
SUM: Final = _c10d.ReduceOp.RedOpType.SUM
AVG: Final = _c10d.ReduceOp.RedOpType.AVG
Tensors = list[Tensor]


class LossyProcessGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """The process group of ``backend="lossy"``.

    ``backend_options`` is torch's description of the group; ``pg_options`` are the user's
    (:meth:`lossycoll.options.Options.resolve`).
    """

    def __init__(self, backend_options: Any, pg_options: object = None) -> None:
        super().__init__(backend_options.group_rank, backend_options.group_size)
        self._group = Group(
            Place(
                store=backend_options.store,
                rank=backend_options.group_rank,
                size=backend_options.group_size,
                timeout=backend_options.timeout,
                name=str(backend_options.group_id),
            ),
            pg_options,
        )
        self._comm = self._group.communicator
        self._health = self._comm.health
        self._options = self._comm.options
        self._gloo = self._group.gloo
        self._gloo._set_sequence_number_for_group()
        # Parts of torch ask a group for its CPU backend: checkpointing, timeouts, names.
        custom = _c10d.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        self._register_backend(torch.device("cpu"), custom, self._gloo)

    # ---- what and who this is ----

    def getBackendName(self) -> str:
        return "lossy"

    def name(self) -> str:
        return "lossy"

    def get_group_store(self) -> Any:
        return self._group.store

    def lossy_stats(self) -> Stats:
        return self._comm.stats()

    def lossy_last_report(self) -> Report | None:
        return self._comm.last_report()

    def lossy_group_stats(self) -> Mapping[int, Mapping[str, Any]]:
        return self._comm.group_stats()

    # ---- reductions ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = _c10d.AllreduceOptions() if opts is None else opts
        tensor = tensors[0]
        op = opts.reduceOp.op
        call = self._issue("all_reduce", tensors, tensor, op)
        options = self._reducing(tensor, op) if len(tensors) == 1 else None
        if options is None:
            return GlooWork(self._comm, call, self._gloo.allreduce(tensors, opts), tensors)
        buffer = _contiguous(tensor)
        terms = self._terms(options, opts, buffer, mean=op == AVG, copy_to=tensor)
        operation = self._comm.all_reduce(
            call, buffer.data_ptr(), buffer.numel(), DTYPES[buffer.dtype], terms
        )
        return EngineWork(self._comm, operation, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        one = _c10d.AllreduceOptions()
        if opts is not None:
            one.reduceOp = opts.reduceOp
            one.timeout = opts.timeout
        return ManyWork([self.allreduce([tensor], one) for tensor in tensors], tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = _c10d.ReduceScatterOptions() if opts is None else opts
        op = opts.reduceOp.op
        call = self._issue("reduce_scatter", [output, input], input, op)
        options = self._reducing(input, op)
        if options is None or not self._chunks(output, input):
            inner = self._gloo._reduce_scatter_base(output, input, opts)
            return GlooWork(self._comm, call, inner, [output])
        return self._scatter_sum(call, [output], _contiguous(input), options, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return ManyWork([self.reduce_scatter_single(o, i, opts) for o, i in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        opts = _c10d.ReduceScatterOptions() if opts is None else opts
        op = opts.reduceOp.op
        output, parts = outputs[0], inputs[0]
        call = self._issue("reduce_scatter", [*outputs, *parts], output, op)
        if len(outputs) == 1 and self._alike(output, parts):
            options = self._reducing(output, op, parts=self._comm.world)
            if options is not None:
                flat = torch.cat([part.detach().reshape(-1) for part in parts])
                return self._scatter_sum(call, outputs, flat, options, opts)
        inner = self._gloo.reduce_scatter(outputs, inputs, opts)
        return GlooWork(self._comm, call, inner, outputs)

    def _scatter_sum(
        self, call: Collective, outputs: Tensors, source: Tensor, options: Options, opts: Any
    ) -> dist.Work:
        target = _contiguous(outputs[0])
        terms = self._terms(
            options,
            opts,
            (source, target),
            mean=opts.reduceOp.op == AVG,
            copy_to=outputs[0],
            copy_from=target,
        )
        buffers = (source.data_ptr(), target.data_ptr())
        dtype = DTYPES[source.dtype]
        operation = self._comm.reduce_scatter(call, buffers, target.numel(), dtype, terms)
        return EngineWork(self._comm, operation, outputs)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        detail = f"{opts.reduceOp.op.name} to {opts.rootRank}"
        call = self._issue("reduce", tensors, tensors[0], detail)
        return GlooWork(self._comm, call, self._gloo.reduce(tensors, opts), tensors)

    # ---- copies ----

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor, root = tensors[0], opts.rootRank
        call = self._issue("broadcast", tensors, tensor, root)
        options = self._copying(tensor) if len(tensors) == 1 else None
        if options is None:
            return GlooWork(self._comm, call, self._gloo.broadcast(tensors, opts), tensors)
        buffer = _contiguous(tensor)
        terms = self._terms(options, opts, buffer, copy_to=tensor)
        nbytes = buffer.numel() * buffer.element_size()
        operation = self._comm.broadcast(call, buffer.data_ptr(), nbytes, root, terms)
        return EngineWork(self._comm, operation, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        call = self._issue("all_gather", [output, input], input)
        options = self._copying(output)
        if options is None or not self._chunks(input, output):
            inner = self._gloo._allgather_base(output, input, opts)
            return GlooWork(self._comm, call, inner, [output])
        source, target = _contiguous(input), _contiguous(output)
        terms = self._terms(options, opts, (source, target), copy_to=output, copy_from=target)
        return EngineWork(self._comm, self._gather(call, source, target, terms), [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return ManyWork([self.all_gather_single(o, i, opts) for o, i in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        tensor, parts = inputs[0], outputs[0]
        call = self._issue("all_gather", [*inputs, *parts], tensor)
        if len(inputs) == 1 and self._alike(tensor, parts):
            options = self._copying(tensor, parts=self._comm.world)
            if options is not None:
                source = _contiguous(tensor)
                target = source.new_empty((len(parts), *source.shape))
                if self._lossy(options):
                    # What never arrives is to stay as it was, in the caller's tensors.
                    for row, part in zip(target, parts, strict=True):
                        row.copy_(part.detach())

                def spread() -> None:
                    for row, part in zip(target, parts, strict=True):
                        part.detach().copy_(row)

                terms = self._terms(options, opts, (source, target), epilogue=spread)
                operation = self._gather(call, source, target, terms)
                return EngineWork(self._comm, operation, parts)
        inner = self._gloo.allgather(outputs, inputs, opts)
        return GlooWork(self._comm, call, inner, parts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        call = self._issue("all_gather_coalesced", inputs, inputs[0])
        inner = self._gloo.allgather_coalesced(outputs, inputs, opts)
        return GlooWork(self._comm, call, inner, [t for ts in outputs for t in ts])

    def _gather(self, call: Collective, source: Tensor, target: Tensor, terms: Terms) -> Operation:
        buffers = (source.data_ptr(), target.data_ptr())
        nbytes = source.numel() * source.element_size()
        return self._comm.all_gather(call, buffers, nbytes, terms)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        call = self._issue("gather", inputs, inputs[0], f"to {opts.rootRank}")
        inner = self._gloo.gather(outputs, inputs, opts)
        return GlooWork(self._comm, call, inner, outputs[0] if outputs else [])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        call = self._issue("scatter", outputs, outputs[0], f"from {opts.rootRank}")
        return GlooWork(self._comm, call, self._gloo.scatter(outputs, inputs, opts), outputs)

    # ---- exchanges, where sizes may rightly differ between ranks ----

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        opts = _c10d.AllToAllOptions() if opts is None else opts
        call = self._issue("all_to_all", [output, input])
        sizes = (list(output_split_sizes), list(input_split_sizes))
        inner = self._gloo.alltoall_base(output, input, *sizes, opts)
        return GlooWork(self._comm, call, inner, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _c10d.AllToAllOptions() if opts is None else opts
        call = self._issue("all_to_all", [*outputs, *inputs])
        return GlooWork(self._comm, call, self._gloo.alltoall(outputs, inputs, opts), outputs)

    # ---- point to point ----

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._direct(f"send to {dst}", tensors, lambda: self._gloo.send(tensors, dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._direct(
            f"receive from {src}", tensors, lambda: self._gloo.recv(tensors, src, tag)
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._direct("receive", tensors, lambda: self._gloo.recv_anysource(tensors, tag))

    recvAnysource = recv_anysource

    def _direct(self, name: str, tensors: Tensors, post: Callable[[], dist.Work]) -> dist.Work:
        """Posts at call time: whoever sends before it receives must not wait for a turn."""
        call = Collective(name, tensors[0].dtype, tensors[0].numel())
        self._check_device(name, tensors)
        self._health.admit(call)
        try:
            return PointToPointWork(self._comm, call, post(), tensors)
        except RuntimeError as error:
            if "gloo/transport" not in str(error):
                raise  # a bad argument
            raise self._health.verdict(call, error).again(call.numbered) from error

    # ---- barriers ----

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = _c10d.BarrierOptions() if opts is None else opts
        call = self._issue("barrier", [])
        return GlooWork(self._comm, call, self._gloo.barrier(opts), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._issue("monitored_barrier", [])
        self._gloo.monitored_barrier(timeout or timedelta(0), wait_all_ranks)

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        self._comm.timeout = timeout.total_seconds()
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        self._group.close()

    def abort(self) -> None:
        text = f"{self._health.where}: the group was aborted here by abort_process_group"
        self._health.fail(AbortedError(text, peer=self._comm.rank), tell=True)
        self._group.close()

    # ---- which way a call takes ----

    def _issue(
        self, name: str, tensors: Tensors, shape: Tensor | None = None, detail: object = ""
    ) -> Collective:
        """Checks the tensors and numbers the call; ``shape`` is the tensor all ranks agree on."""
        self._check_device(name, tensors)
        if shape is None:
            call = Collective(name, detail=detail)
        else:
            call = Collective(name, shape.dtype, shape.numel(), detail)
        self._health.issue(call)
        return call

    def _check_device(self, name: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise UnsupportedError(
                    f"{self._health.where}: {name} got a tensor on {tensor.device}, but backend "
                    f"'lossy' serves CPU tensors only so far; copy it with .cpu(), or use a group "
                    f"of another backend for it"
                )

    def _reducing(self, tensor: Tensor, op: object, parts: int = 1) -> Options | None:
        """The options for a reduction by the engine; None: it is gloo's.

        ``tensor`` times ``parts`` is the size that counts.
        """
        if op not in (SUM, AVG) or tensor.dtype not in DTYPES or not self._plain(tensor):
            return None
        options = self._effective()
        nbytes = tensor.numel() * tensor.element_size() * parts
        if options.delivery == "lossy" and nbytes >= options.lossy_min_bytes:
            return options
        return _reliable(options) if nbytes >= options.bulk_min_bytes else None

    def _copying(self, tensor: Tensor, parts: int = 1) -> Options | None:
        """The same for a copy. Only a block of ``lossy()`` makes copies lossy, and only floats."""
        if not self._plain(tensor):
            return None
        block = scope()
        options = self._effective()
        nbytes = tensor.numel() * tensor.element_size() * parts
        wanted = block is not None and block.lossy_copies and tensor.dtype in DTYPES
        if wanted and options.delivery == "lossy" and nbytes >= options.lossy_min_bytes:
            return options
        return _reliable(options) if nbytes >= options.bulk_min_bytes else None

    def _effective(self) -> Options:
        block: Scope | None = scope()
        return self._options if block is None else within(self._options, block)

    def _lossy(self, options: Options) -> bool:
        return options.delivery == "lossy"

    def _plain(self, tensor: Tensor) -> bool:
        """Whether the engine could touch the tensor's memory, or that of a contiguous copy."""
        return (
            self._comm.world > 1
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and not tensor.is_neg()
            and not tensor.is_conj()
        )

    def _chunks(self, part: Tensor, whole: Tensor) -> bool:
        """Whether ``whole`` is one ``part`` per rank; gloo says what is wrong if not."""
        return (
            part.dtype == whole.dtype
            and self._plain(part)
            and part.numel() * self._comm.world == whole.numel()
        )

    def _alike(self, tensor: Tensor, parts: Tensors) -> bool:
        """Whether ``parts`` are one tensor per rank, all like ``tensor``."""
        return len(parts) == self._comm.world and all(
            part.shape == tensor.shape and part.dtype == tensor.dtype and self._plain(part)
            for part in parts
        )

    def _terms(
        self,
        options: Options,
        opts: Any,
        keep: object,
        *,
        mean: bool = True,
        copy_to: Tensor | None = None,
        copy_from: Tensor | None = None,
        epilogue: Callable[[], None] | None = None,
    ) -> Terms:
        """``copy_to``: the caller's tensor; ``copy_from`` the buffer, if ``keep`` isn't it."""
        buffer = keep if copy_from is None else copy_from
        if copy_to is not None and isinstance(buffer, Tensor) and buffer is not copy_to:
            target = copy_to

            def epilogue() -> None:
                target.detach().copy_(buffer.view(target.shape))

        seconds = opts.timeout.total_seconds()
        return Terms(
            options=options,
            mean=mean,
            timeout=seconds if seconds > 0 else None,
            keep=(keep, copy_to),
            epilogue=epilogue,
            future=opts.asyncOp,
        )


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is in order, or a copy in order."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


@lru_cache(maxsize=64)
def _reliable(options: Options) -> Options:
    """The same options with nothing given up."""
    return within(options, Scope((("delivery", "reliable"),), lossy_copies=False))


def of(group: dist.ProcessGroup | None) -> LossyProcessGroup:
    """The lossy group behind torch's handle (None: the default group).

    Raises UnsupportedError for a group of another backend.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, LossyProcessGroup):
        backend = "none" if found is None else found.name()
        raise UnsupportedError(
            f"this needs a group of backend 'lossy', got one of backend {backend!r}; call "
            f"init_process_group or new_group with backend='lossy' first"
        )
    return found

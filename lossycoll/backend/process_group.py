"""torch.distributed's surface: torch's collectives in, communicator and gloo calls out.

Every collective is written out here and none inherited: torch's trampoline keeps the GIL while it
runs an inherited one, which then waits for gloo's thread, which waits for the GIL.
docs/backend.md says which call takes which way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import AbortedError, MismatchError, UnsupportedError
from lossycoll.options.fields import Options
from lossycoll.runtime.core.call import Collective, bounded
from lossycoll.runtime.engine.reports import Report, Stats

from .block_collectives import BlockCalls, BlockWork, ContributionWork
from .bootstrap import Group, Place
from .dispatch import Reduction, Routes, reliable_version
from .dynamo_skip import opaque
from .point_to_point import Direct
from .resource_limits import told
from .sparse import Sparse
from .tensors import (
    DTYPES,
    address,
    apart,
    contiguous,
    copy_back,
    flat,
    nbytes,
    room,
    scaled,
    spread,
)
from .work import ManyWork, no_time_for_barrier, why_no_barrier

_c10d: Any = c10d  # its stub lacks half of what is used here, and has overloads we don't serve
Tensors = list[Tensor]


class LossyProcessGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """The process group of ``backend="lossy"``.

    ``backend_options`` is torch's description of the group; ``pg_options`` are the user's
    (:meth:`lossycoll.options.fields.Options.resolve`).
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
        self._routes = Routes(self._comm)
        self._direct = Direct(self._routes, self._comm, self._group.messages)
        self._operations = self._routes.operations
        self._splits = 0
        self._sparse = Sparse(self._routes, self._comm)
        self._block_calls = BlockCalls(self._routes, self._comm)
        self._gloo = self._group.gloo
        if torch.__version__ < "2.14":  # from then on it warns: numbers start at 0 by themselves
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

    def lossy_options(self) -> Options:
        """Those in force for a call made now: the group's, as the block around changes them."""
        return self._routes.effective()

    def lossy_resend(self, rounds: int) -> Callable[[], None]:
        """From now on ``repair`` is at least ``rounds``, unless it was written or set when this was
        made. Returns what takes that back. All ranks must call both alike."""
        return self._routes.resend(rounds)

    def lossy_lost(self) -> tuple[int, ...]:
        """Ranks that the group goes on without, as soon as this rank knows."""
        return tuple(sorted(self._health.without))

    def lossy_lost_alike(self) -> tuple[int, ...]:
        """Ranks that the last collective was made without: the same on all ranks at the same place
        among their collectives, so what they do next may depend on it. Says nothing of a rank that
        was lost since; the next collective will."""
        return self._comm.lost_alike()

    def lossy_last_report(self) -> Report | None:
        return self._comm.last_report()

    def lossy_group_stats(self) -> Mapping[int, Mapping[str, Any]]:
        return self._comm.group_stats()

    # ---- reductions ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = _c10d.AllreduceOptions() if opts is None else opts
        tensor = self._routes.only("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._sparse.all_reduce(tensor, opts)
        self._routes.check_targets("all_reduce", tensors)
        reduction = self._routes.reduction("all_reduce", tensor.dtype, opts.reduceOp)
        options = self._routes.all_reducing(tensor.dtype, nbytes(tensor), reduction)
        call = self._routes.issue("all_reduce", tensors, tensor, opts.reduceOp.op, options)
        if not tensor.numel():
            return self._routes.nothing(call, opts, tensors)
        if options is None:
            return self._routes.by_gloo(
                call, lambda targets: self._gloo.allreduce(targets, opts), tensors
            )
        if not reduction.native:
            return self._reduce_here(call, tensor, reduction, options, opts)
        buffer = reduction.contribution(tensor)
        finish = copy_back(buffer, tensor)
        terms = self._routes.terms(options, opts, buffer, finish, op=reduction.op)
        return self._routes.work(
            self._operations.all_reduce(
                call, buffer.data_ptr(), buffer.numel(), DTYPES[buffer.dtype], terms
            ),
            tensors,
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        one = _c10d.AllreduceOptions()
        if opts is not None:
            one.reduceOp = opts.reduceOp
            one.timeout = opts.timeout
            one.asyncOp = opts.asyncOp
        return ManyWork([self.allreduce([tensor], one) for tensor in tensors], tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor, root = self._routes.only("reduce", tensors), opts.rootRank
        # Only the root has the result, so nothing could be made of what it lacks: always reliable.
        self._routes.check_targets("reduce", tensors)
        self._routes.check_root("reduce", root)
        reduction = self._routes.reduction("reduce", tensor.dtype, opts.reduceOp)
        options = reliable_version(self._routes.effective())
        detail = f"{opts.reduceOp.op.name} to {root}"
        call = self._routes.issue("reduce", tensors, tensor, detail, options)
        if not tensor.numel():
            return self._routes.nothing(call, opts, tensors)
        return self._reduce_here(call, tensor, reduction, options, opts, root=root)

    def _reduce_here(
        self,
        call: Collective,
        tensor: Tensor,
        reduction: Reduction,
        options: Options,
        opts: Any,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Gathers what the engine can't add (at ``root``, or everywhere) and reduces it there."""
        source = reduction.contribution(tensor)
        if root is not None and root != self._comm.rank:
            terms = self._routes.terms(options, opts, source, among=lambda _: None)
            buffers = (source.data_ptr(), source.data_ptr())
            operation = self._operations.gather(call, buffers, nbytes(source), root, terms)
            return self._routes.work(operation, [tensor])
        rows = self._rows(source)

        def finish(members: Sequence[int]) -> None:
            spread(reduction.over(rows, members), [tensor])

        terms = self._routes.terms(options, opts, (source, rows), among=finish)
        buffers = (source.data_ptr(), rows.data_ptr())
        if root is None:
            operation = self._operations.all_gather(call, buffers, nbytes(source), terms)
        else:
            operation = self._operations.gather(call, buffers, nbytes(source), root, terms)
        return self._routes.work(operation, [tensor])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = _c10d.ReduceScatterOptions() if opts is None else opts
        self._routes.check_targets("reduce_scatter", [output])
        self._routes.check_chunks("reduce_scatter", output, input)
        reduction = self._routes.reduction("reduce_scatter", input.dtype, opts.reduceOp)
        options = self._routes.reducing(nbytes(input), reduction)
        op = opts.reduceOp.op
        call = self._routes.issue("reduce_scatter", [output, input], input, op, options)
        if not input.numel():
            return self._routes.nothing(call, opts, [output])
        source = reduction.contribution(input)
        return self._reduce_scatter(
            call, output, source, reduction, sizes=output.numel(), options=options, opts=opts
        )

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
        output = self._routes.only("reduce_scatter", outputs)
        parts = self._routes.only("reduce_scatter", inputs)
        self._routes.check_targets("reduce_scatter", outputs)
        sizes = self._routes.check_parts("reduce_scatter", output, parts)
        reduction = self._routes.reduction("reduce_scatter", output.dtype, opts.reduceOp)
        size = sum(sizes) * output.element_size()
        options = self._routes.reducing(size, reduction)
        even = len(set(sizes)) == 1
        detail = opts.reduceOp.op if even else f"{opts.reduceOp.op.name} of {list(sizes)}"
        call = self._routes.issue(
            "reduce_scatter", [output, *parts], output if even else None, detail, options
        )
        if not any(sizes):
            return self._routes.nothing(call, opts, outputs)
        source = scaled(flat(parts), reduction.factor)
        return self._reduce_scatter(
            call,
            output,
            source,
            reduction,
            sizes=sizes[0] if even else sizes,
            options=options,
            opts=opts,
        )

    def _reduce_scatter(
        self,
        call: Collective,
        output: Tensor,
        source: Tensor,
        reduction: Reduction,
        *,
        sizes: int | tuple[int, ...],
        options: Options,
        opts: Any,
    ) -> dist.Work:
        """``source``: a chunk for each rank, one after another, of ``sizes`` elements."""
        if reduction.native:
            target = contiguous(output)
            source = apart(source, target, own=self._comm.rank * nbytes(target))
            finish = copy_back(target, output)
            terms = self._routes.terms(options, opts, (source, target), finish, op=reduction.op)
            buffers = (address(source), address(target))
            operation = self._operations.reduce_scatter(
                call, buffers, sizes, DTYPES[source.dtype], terms
            )
            return self._routes.work(operation, [output])
        rows = self._rows(output)

        def finish_here(members: Sequence[int]) -> None:
            spread(reduction.over(rows, members), [output])

        terms = self._routes.terms(options, opts, (source, rows), among=finish_here)
        buffers = (address(source), address(rows))
        if isinstance(sizes, int):
            operation = self._operations.all_to_all(call, buffers, nbytes(output), terms)
        else:
            send = [size * output.element_size() for size in sizes]
            receive = [nbytes(output)] * self._comm.world
            operation = self._operations.exchange(call, buffers, send, receive, terms)
        return self._routes.work(operation, [output])

    # ---- copies ----

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor, root = self._routes.only("broadcast", tensors), opts.rootRank
        self._routes.check_targets("broadcast", tensors)
        self._routes.check_root("broadcast", root)
        options = self._routes.copying(tensor.dtype, nbytes(tensor))
        call = self._routes.issue("broadcast", tensors, tensor, f"from {root}", options)
        if not tensor.numel():
            return self._routes.nothing(call, opts, tensors)
        if options is None:
            return self._routes.by_gloo(
                call, lambda targets: self._gloo.broadcast(targets, opts), tensors
            )
        buffer = contiguous(tensor)
        terms = self._routes.terms(options, opts, buffer, copy_back(buffer, tensor))
        operation = self._operations.broadcast(call, buffer.data_ptr(), nbytes(buffer), root, terms)
        return self._routes.work(operation, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = _c10d.AllgatherOptions() if opts is None else opts
        self._routes.check_targets("all_gather", [output])
        self._routes.check_chunks("all_gather", input, output)
        options = self._routes.copying(output.dtype, nbytes(output))
        call = self._routes.issue("all_gather", [output, input], input, options=options)
        if not output.numel():
            return self._routes.nothing(call, opts, [output])
        source = contiguous(input)
        if options is None:
            return self._routes.by_gloo(
                call,
                lambda targets: self._gloo._allgather_base(  # it refuses the stacked shape
                    targets[0].view(-1), source.detach().flatten().clone(), opts
                ),
                [output],
            )
        target = contiguous(output)
        source = apart(source, target, own=-self._comm.rank * nbytes(source))
        terms = self._routes.terms(options, opts, (source, target), copy_back(target, output))
        buffers = (source.data_ptr(), target.data_ptr())
        operation = self._operations.all_gather(call, buffers, nbytes(source), terms)
        return self._routes.work(operation, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return ManyWork([self.all_gather_single(o, i, opts) for o, i in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @property
    def block_bytes(self) -> int:
        """What one block (packet) carries."""
        return self._comm.block_bytes

    def blocks(self, nbytes: int) -> int:
        """The blocks (packets) of a chunk of ``nbytes`` in :meth:`all_gather_blocks`."""
        return self._comm.blocks(nbytes)

    def all_gather_blocks(
        self, output: Tensor, needed: NDArray[np.bool_] | None = None
    ) -> BlockWork:
        """Rank r's chunk of ``output`` on all ranks, in place, block by block.

        ``output``: (world * n,), contiguous; chunk r is ``output[r * n : (r + 1) * n]``. In lossy
        delivery (the group's, or a block's) a block that doesn't arrive leaves what was there.
        ``needed``: bool (world, blocks), those that are asked for until they come, by owner; own
        row ignored. Returns a work whose ``arrived`` waits for it and is bool (world, blocks): own
        row True. A needed block is missing in it only if nothing came over that link for
        ``deadline_max`` seconds, or if its owner is lost.

        Raises UnsupportedError for tensors of another form.
        """
        return self._block_calls.all_gather(output, needed)

    def reduce_scatter_blocks(self, output: Tensor, input: Tensor) -> ContributionWork:
        """The sum over all ranks of their chunks number ``rank``, divided by the world: in
        ``output``, of what arrived of ``input``.

        ``input``: (world * n,), contiguous, floating; ``output``: (n,), contiguous, which may be
        this rank's chunk of ``input``. In lossy delivery what is lost counts as *zero*: for callers
        that add it to their next contribution. Returns a work whose ``lost`` waits for it and is
        bool (world, blocks), by owner: the blocks (packets) of this rank's contributions that were
        lost. What a link lost that was silent for ``deadline_max`` isn't known, and not in it.

        Raises UnsupportedError for tensors of another form.
        """
        return self._block_calls.reduce_scatter(output, input)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """``outputs[0]``: a tensor per rank, which may be of different sizes."""
        opts = _c10d.AllgatherOptions() if opts is None else opts
        tensor = self._routes.only("all_gather", inputs)
        parts = self._routes.only("all_gather", outputs)
        self._routes.check_targets("all_gather", parts)
        sizes = self._routes.check_parts("all_gather", tensor, parts)
        options = self._routes.copying(tensor.dtype, sum(sizes) * tensor.element_size())
        even = len(set(sizes)) == 1
        call = self._routes.issue(
            "all_gather",
            [tensor, *parts],
            tensor if even else None,
            "" if even else f"{tensor.dtype} {list(sizes)}",
            options,
        )
        if not any(sizes):
            return self._routes.nothing(call, opts, parts)
        source = contiguous(tensor)
        if options is None and even:
            return self._routes.by_gloo(
                call,
                lambda targets: self._gloo.allgather([targets], [source.detach().clone()], opts),
                parts,
            )
        options = options or reliable_version(self._routes.effective())
        rows, finish = room(parts, kept=options.delivery == "lossy")
        source = apart(source, rows)
        terms = self._routes.terms(options, opts, (source, rows), finish)
        counts = tuple(size * tensor.element_size() for size in sizes)
        operation = self._operations.all_gather(
            call, (address(source), rows.data_ptr()), counts[0] if even else counts, terms
        )
        return self._routes.work(operation, parts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """``outputs[rank][i]`` receives rank's ``inputs[i]``."""
        works = [
            self.allgather([[row[i] for row in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return ManyWork(works, [tensor for row in outputs for tensor in row])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        tensor, root = self._routes.only("gather", inputs), opts.rootRank
        self._routes.check_root("gather", root)
        parts: Tensors = []
        if root == self._comm.rank:
            parts = self._routes.only("gather", outputs)
            self._routes.check_targets("gather", parts)
            self._routes.check_list("gather", tensor, parts)
        options = self._routes.exact(tensor.dtype, nbytes(tensor))
        call = self._routes.issue("gather", [tensor, *parts], tensor, f"to {root}", options)
        if not tensor.numel():
            return self._routes.nothing(call, opts, parts)
        source = contiguous(tensor)
        if options is None:
            return self._routes.by_gloo(
                call,
                lambda targets: self._gloo.gather(
                    [targets] if parts else [], [source.detach().clone()], opts
                ),
                parts,
            )
        rows = self._rows(source) if parts else source
        finish = (lambda: spread(rows, parts)) if parts else None
        terms = self._routes.terms(options, opts, (source, rows), finish)
        buffers = (source.data_ptr(), rows.data_ptr())
        operation = self._operations.gather(call, buffers, nbytes(source), root, terms)
        return self._routes.work(operation, parts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        output, root = self._routes.only("scatter", outputs), opts.rootRank
        self._routes.check_targets("scatter", outputs)
        self._routes.check_root("scatter", root)
        parts: Tensors = []
        if root == self._comm.rank:
            parts = self._routes.only("scatter", inputs)
            self._routes.check_list("scatter", output, parts)
        options = self._routes.exact(output.dtype, nbytes(output))
        call = self._routes.issue("scatter", [output, *parts], output, f"from {root}", options)
        if not output.numel():
            return self._routes.nothing(call, opts, outputs)
        if options is None:
            dense = [contiguous(part).detach().clone() for part in parts]
            return self._routes.by_gloo(
                call,
                lambda targets: self._gloo.scatter(targets, [dense] if parts else [], opts),
                outputs,
            )
        target = contiguous(output)
        source = flat(parts) if parts else target
        terms = self._routes.terms(options, opts, (source, target), copy_back(target, output))
        buffers = (source.data_ptr(), target.data_ptr())
        operation = self._operations.scatter(call, buffers, nbytes(target), root, terms)
        return self._routes.work(operation, outputs)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Room for one tensor like this per rank."""
        return tensor.new_empty((self._comm.world, *tensor.shape))

    # ---- exchanges ----

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        opts = _c10d.AllToAllOptions() if opts is None else opts
        self._routes.check_targets("all_to_all", [output])
        send = self._routes.splits(input, input_split_sizes)
        receive = self._routes.splits(output, output_split_sizes)
        self._routes.check_own(send, receive)
        self._routes.check_dtypes("all_to_all", [output, input])
        call = self._routes.issue("all_to_all", [output, input], detail=str(input.dtype))
        target = contiguous(output)
        source = apart(contiguous(input), target)
        finish = copy_back(target, output)
        return self._exchange(
            call, (source, target), (send, receive), finish, opts=opts, result=[output]
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _c10d.AllToAllOptions() if opts is None else opts
        for tensors in (outputs, inputs):
            if len(tensors) != self._comm.world:
                raise self._routes.refusal("all_to_all", f"{len(tensors)} tensors for")
        self._routes.check_targets("all_to_all", outputs)
        counts = ([nbytes(tensor) for tensor in inputs], [nbytes(tensor) for tensor in outputs])
        self._routes.check_own(*counts)
        self._routes.check_dtypes("all_to_all", [*outputs, *inputs])
        call = self._routes.issue("all_to_all", [*outputs, *inputs], detail=str(inputs[0].dtype))
        source, target = flat(inputs), flat(outputs)
        return self._exchange(
            call,
            (source, target),
            counts,
            lambda: spread(target, outputs),
            opts=opts,
            result=outputs,
        )

    def _exchange(
        self,
        call: Collective,
        tensors: tuple[Tensor, Tensor],
        counts: tuple[list[int], list[int]],
        finish: Callable[[], None] | None,
        *,
        opts: Any,
        result: Tensors,
    ) -> dist.Work:
        """Sends and receives ``counts`` bytes per rank. Only this rank knows them, so beside the
        data each rank tells what it sends, and each looks whether it expects just that."""
        options = reliable_version(self._routes.effective())
        terms = self._routes.terms(options, opts, tensors, finish)
        told = torch.tensor(counts[0])
        table = told.new_empty((self._comm.world, self._comm.world))

        def compare() -> None:
            for peer, wanted in enumerate(counts[1]):
                sent = int(table[peer, self._comm.rank])
                if sent != wanted:
                    where = self._health.where
                    error = MismatchError(
                        f"{where}: {call.numbered}: {where.peer(peer)} sends {sent} bytes where "
                        f"{wanted} are expected here; make the split sizes of both ranks agree",
                        peer=peer,
                    )
                    self._health.fail(error, tell=True)
                    raise error

        check = self._routes.terms(options, opts, (told, table), compare)
        works = [
            self._routes.work(
                self._operations.all_gather(
                    call, (told.data_ptr(), table.data_ptr()), nbytes(told), check
                ),
                result,
            ),
            self._routes.work(
                self._operations.exchange(
                    call, (address(tensors[0]), address(tensors[1])), *counts, terms
                ),
                result,
            ),
        ]
        return ManyWork(works, result)

    # ---- point to point ----

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._direct.send(tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._direct.receive(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._direct.receive(tensors, None, tag)

    recvAnysource = recv_anysource

    # ---- works that torch wants as one; torch's own would ask gloo, which refuses ----

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        del device
        self._routes.begin_coalescing()

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        del device
        return self._routes.end_coalescing()

    # ---- barriers ----

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = _c10d.BarrierOptions() if opts is None else opts
        call = self._routes.issue("barrier", [])
        if self._comm.world > 1 and self._comm.options.bulk_min_bytes:
            return self._routes.by_gloo(call, lambda _: self._gloo.barrier(opts), [])
        return self._routes.work(self._routes.barrier(call, opts), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Gloo's, whose error names the ranks that are missing; or a barrier of those left."""
        if self._comm.options.outlives:
            opts = _c10d.BarrierOptions()
            if timeout is not None:
                opts.timeout = timeout
            self.barrier(opts).wait()
            return
        call = self._routes.issue("monitored_barrier", [])
        timeout = timedelta(seconds=self._comm.timeout) if timeout is None else timeout
        if not timeout and self._comm.rank == 0:
            # Gloo takes what is left of it, nothing, for no limit, unless a millisecond has passed.
            raise no_time_for_barrier(self._health, call)
        try:
            self._gloo.monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise why_no_barrier(self._health, call, error) from error

    # ---- other groups ----

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> LossyProcessGroup | None:
        """A group of some of this one's ranks, by its numbers; None where this rank isn't one.

        ``opts`` are pg_options. torch.distributed.split_group gets here only with an accelerator.
        """
        del device_types
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self._comm.world:
            raise self._routes.refusal("split_group", f"ranks {list(ranks)} in")
        if self._comm.rank not in chosen:
            return None
        self._splits += 1
        name = group_name or f"{self.group_name}:split:{self._splits}:{chosen}"
        split = LossyProcessGroup(
            SimpleNamespace(
                store=_c10d.PrefixStore(f"split/{name}", self._group.store),
                group_rank=chosen.index(self._comm.rank),
                group_size=len(chosen),
                timeout=timeout or timedelta(seconds=self._comm.timeout),
                group_id=name,
            ),
            opts,
        )
        split._set_group_name(name)
        split._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits}")
        return split

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        timeout = bounded(timeout)
        self._comm.timeout = timeout.total_seconds()
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        self._group.close()

    def abort(self) -> None:
        text = f"{self._health.where}: the group was aborted here by abort_process_group"
        self._health.fail(AbortedError(text, peer=self._comm.rank), tell=True)
        self._group.close()


for _name in (
    *("allreduce", "reduce", "broadcast", "barrier", "gather", "scatter", "allgather"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("all_gather_blocks", "reduce_scatter_blocks"),
    *("all_gather_single", "_allgather_base", "alltoall", "all_to_all_single", "alltoall_base"),
):
    setattr(LossyProcessGroup, _name, told(getattr(LossyProcessGroup, _name)))

opaque(LossyProcessGroup)  # after the last change to its methods


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

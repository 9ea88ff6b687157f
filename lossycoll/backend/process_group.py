"""torch.distributed's surface: each of torch's calls, described as data and handed over.

Lists have a tensor for each rank, at the root alone where there is one.

Every collective is written out here and none inherited: torch's trampoline keeps the GIL while it
runs an inherited one, and who then waits for a thread that needs the GIL waits for ever.
docs/backend.md says which call takes which route; ``dispatch.py`` chooses it.

Long because all of torch's calls are in one place.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import AbortedError, UnsupportedError
from lossycoll.runtime.collectives.group_stats import Counted, total
from lossycoll.runtime.core.call import bounded
from lossycoll.runtime.engine.reports import Stats

from . import checks, sparse
from . import collectives as kinds
from .bootstrap import Group
from .builder import GroupSpec
from .description import Description, Splits
from .devices import HAS_BACKENDS, SERVED, DeviceBackend, ServedDevices
from .dispatch import Dispatcher
from .extensions import Extensions
from .overloads import c10d, opaque, serve
from .point_to_point import PointToPoint, monitored_barrier
from .reconfiguration import Reconfiguration
from .tensors import nbytes
from .work import ManyWork

Tensors = list[Tensor]
_serials = count()
_living: weakref.WeakValueDictionary[int, LossyProcessGroup] = weakref.WeakValueDictionary()
"""The groups of this process that were not destroyed, in the order in which they were made."""


class LossyProcessGroup(Extensions, c10d.ProcessGroup):  # type: ignore[misc]
    """Process group of ``backend="lossy"``.

    torch.distributed calls its methods; docs/backend.md says which call takes which route.
    :class:`Extensions` has the methods that torch's interface lacks, and :class:`Reconfigurable`
    the change of members. All other methods have the arguments and results of torch's ProcessGroup.
    Every collective returns a work, which owns its tensors until it is done. The work's result is
    the filled tensors. A call that can't be served raises UnsupportedError, before it gets a
    number. A call raises LossyError if the group has failed, or fails by this call. The work's
    ``wait`` raises later failures. Tensors have any shape, and lie on the CPU or on a CUDA device.
    All tensors of a call have one dtype; ranks agree on it and on the number of elements. Lists of
    one tensor per rank, in ``allgather`` and ``reduce_scatter``, may have different sizes. Methods
    also take torch's short forms, such as ``allreduce(tensor, op)``.

    Args:
        backend_options: torch's description of the group.
        pg_options: The user's options, as :meth:`Options.resolve` takes them.
    """

    def __init__(self, backend_options: Any, pg_options: object = None) -> None:
        super().__init__(backend_options.group_rank, backend_options.group_size)
        # The group that is split, or torch's default group.
        parent = getattr(backend_options, "parent", dist.group.WORLD)
        spec = GroupSpec(
            store=backend_options.store,
            rank=backend_options.group_rank,
            size=backend_options.group_size,
            timeout=backend_options.timeout,
            name=str(backend_options.group_id),
            # torch lists none for the default group.
            global_ranks=tuple(
                backend_options.global_ranks_in_group or range(backend_options.group_size)
            ),
            parent=parent._group.as_parent if isinstance(parent, LossyProcessGroup) else None,
            pg_options=pg_options,
        )
        self._timeout = spec.timeout
        self._serial = next(_serials)
        self._name, self._description = "", "undefined"  # as torch has it
        self._abort_hooks: dict[int, Callable[[], object]] = {}
        given = getattr(backend_options, "configured", "")
        self._configured = (lambda: given) if given else _configured(self)
        changes = getattr(backend_options, "enable_reconfigure", False)
        self._reconfiguration = Reconfiguration(spec) if changes else None
        failure = self._reconfiguration.no_members() if self._reconfiguration else None
        self._take(spec, Group(spec, failure))
        custom = c10d.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        self._backend = DeviceBackend(self)
        registered = self._backend if HAS_BACKENDS else None
        self._register_backend(torch.device("cpu"), custom, registered)
        if torch.version.cuda is not None:
            self._register_backend(torch.device("cuda"), custom, registered)

    def __deepcopy__(self, memo: object) -> LossyProcessGroup:
        """Return the group: a copy of a model works in it as well, as by a hook's state."""
        return self

    def _take(self, spec: GroupSpec, group: Group) -> None:
        """From now on calls are ``group``'s."""
        # Of these ranks and in this membership, so that all members count alike, newcomers too.
        self._splits: Counter[tuple[int, ...]] = Counter()
        self._global_ranks = spec.global_ranks
        self._group = group
        self._endpoint = group.endpoint
        self._endpoint.operations.timeout = bounded(self._timeout).total_seconds()
        self._health = self._endpoint.health
        self._where = self._health.where
        # The group's: that of spec is for the meeting, which reconfigure may give another one.
        self._devices = ServedDevices(
            self._where, self._configured, spec.store, bounded(self._timeout)
        )
        self._dispatcher = Dispatcher(self._endpoint, self._devices)
        self._again = self._dispatcher.run_again
        self._coalescing = self._dispatcher.coalescing
        self._point_to_point = PointToPoint(self._dispatcher, group.messages)
        group.abort_hooks = self._abort_hooks
        _living[self._serial] = self

    # ---- what and who this is ----

    def getBackendName(self) -> str:
        """Return the backend's name, for torch's C++."""
        return "lossy"

    def name(self) -> str:
        """The backend's name."""
        return "lossy"

    def getRank(self) -> int:
        """Return this rank in the group, for torch's C++."""
        return self._where.rank

    def getSize(self) -> int:
        """Return the number of the group's ranks, for torch's C++."""
        return self._where.world

    rank, size = getRank, getSize

    # Torch keeps these with the backend that is registered, which may be none.

    def getGroupName(self) -> str:
        """Return the group's name in torch."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name in torch."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the group's purpose in torch's words."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the group's purpose in torch's words."""
        self._description = description

    def _get_backend(self, device: torch.device) -> Any:
        """The backend of tensors on ``device``, for parts of torch that ask a group."""
        kind = torch.device(device).type
        if kind in SERVED:
            other = self._devices.known_backend_of(kind)
            return self._backend if other is None else other
        return super()._get_backend(device)  # which raises

    get_backend = _get_backend

    def get_group_store(self) -> Any:
        """Return a store for this group, without keys of an earlier one."""
        return self._group.store

    # ---- reductions ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce a tensor of all ranks in place, on all ranks."""
        op, one = opts.reduceOp, tensors[0] if len(tensors) == 1 else None
        if one is not None and (again := self._again(kinds.ALL_REDUCE, one, one, op.op, opts)):
            return again
        return self._dispatcher.run(self._all_reduce(tensors, op), opts)

    def _all_reduce(self, tensors: Tensors, op: Any) -> Description:
        tensor = checks.only(self._where, "all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            continues = self._endpoint.options.continues
            return sparse.describe(self._where, tensor, op, continues=continues)
        return Description(kinds.ALL_REDUCE, tensors, tensors, nbytes(tensor), tensor, op=op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Run :meth:`allreduce` with each tensor, as one work; on an error, none is reduced."""
        calls = [self._all_reduce([tensor], opts.reduceOp) for tensor in tensors]
        return self._dispatcher.run_all(calls, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce a tensor of all ranks to the root; always reliable."""
        tensor = checks.only(self._where, "reduce", tensors)
        call = Description(
            *(kinds.REDUCE, tensors, tensors, nbytes(tensor), tensor),
            op=opts.reduceOp,
            root=opts.rootRank,
        )
        return self._dispatcher.run(call, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce all ranks' ``input``; each rank gets its chunk."""
        op = opts.reduceOp
        if again := self._again(kinds.REDUCE_SCATTER, input, output, op.op, opts):
            return again
        return self._dispatcher.run(self._reduce_scatter_single(output, input, op), opts)

    def _reduce_scatter_single(self, output: Tensor, input: Tensor, op: Any) -> Description:
        checks.check_chunks(self._where, "reduce_scatter", output, input)
        return Description(
            *(kinds.REDUCE_SCATTER, [input], [output], nbytes(input), input),
            op=op,
            harmless_overlap=self._where.rank * nbytes(output),
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Run :meth:`reduce_scatter_single` with each pair, as one work; on an error, none runs."""
        pairs = checks.pairs(self._where, "reduce_scatter", outputs, inputs)
        calls = [self._reduce_scatter_single(*pair, opts.reduceOp) for pair in pairs]
        return self._dispatcher.run_all(calls, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        """Reduce lists of tensors; each rank gets the entry of its number."""
        output = checks.only(self._where, "reduce_scatter", outputs)
        parts = checks.only(self._where, "reduce_scatter", inputs)
        sizes = checks.uneven_sizes(self._where, "reduce_scatter", output, parts)
        call = Description(
            *(kinds.REDUCE_SCATTER, parts, outputs, sum(map(nbytes, parts))),
            compared=None if sizes else output,
            op=opts.reduceOp,
            sizes=sizes,
        )
        return self._dispatcher.run(call, opts)

    # ---- copies ----

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        root, one = opts.rootRank, tensors[0] if len(tensors) == 1 else None
        if one is not None and (again := self._again(kinds.BROADCAST, one, one, root, opts)):
            return again
        tensor = checks.only(self._where, "broadcast", tensors)
        call = Description(kinds.BROADCAST, tensors, tensors, nbytes(tensor), tensor, root=root)
        return self._dispatcher.run(call, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather all ranks' ``input`` on all ranks."""
        if again := self._again(kinds.ALL_GATHER, input, output, None, opts):
            return again
        return self._dispatcher.run(self._all_gather_single(output, input), opts)

    def _all_gather_single(self, output: Tensor, input: Tensor) -> Description:
        checks.check_chunks(self._where, "all_gather", input, output)
        return Description(
            *(kinds.ALL_GATHER, [input], [output], nbytes(output), input),
            harmless_overlap=-self._where.rank * nbytes(input),
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Run :meth:`all_gather_single` with each pair, as one work; on an error, none runs."""
        pairs = checks.pairs(self._where, "all_gather", outputs, inputs)
        return self._dispatcher.run_all([self._all_gather_single(*pair) for pair in pairs], opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather all ranks' tensors as a list on all ranks."""
        tensor = checks.only(self._where, "all_gather", inputs)
        parts = checks.only(self._where, "all_gather", outputs)
        return self._dispatcher.run(self._all_gather(parts, tensor), opts)

    def _all_gather(self, parts: Tensors, tensor: Tensor) -> Description:
        sizes = checks.uneven_sizes(self._where, "all_gather", tensor, parts)
        return Description(
            *(kinds.ALL_GATHER, [tensor], parts, sum(map(nbytes, parts))),
            compared=None if sizes else tensor,
            sizes=sizes,
        )

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Run :meth:`allgather` with each tensor, as one work; on an error, none runs."""
        # The rows of all ranks, each as a list of that rank's tensors.
        rows = [checks.pairs(self._where, "all_gather", row, inputs) for row in outputs]
        calls = [
            self._all_gather([row[i][0] for row in rows], tensor) for i, tensor in enumerate(inputs)
        ]
        work = self._dispatcher.run_all(calls, opts)
        return ManyWork([work], [tensor for row in outputs for tensor in row])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Gather all ranks' tensors at the root."""
        tensor, root = checks.only(self._where, "gather", inputs), opts.rootRank
        parts = self._at_root("gather", outputs, tensor, root)
        call = Description(kinds.GATHER, inputs, parts, nbytes(tensor), tensor, root=root)
        return self._dispatcher.run(call, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Hand out the root's list of tensors, one to each rank."""
        tensor, root = checks.only(self._where, "scatter", outputs), opts.rootRank
        parts = self._at_root("scatter", inputs, tensor, root)
        call = Description(kinds.SCATTER, parts, outputs, nbytes(tensor), tensor, root=root)
        return self._dispatcher.run(call, opts)

    def _at_root(self, name: str, lists: list[Tensors], tensor: Tensor, root: int) -> Tensors:
        """The root's list of tensors like ``tensor``; what other ranks pass is ignored."""
        if self._where.rank != root:
            return []
        parts = checks.only(self._where, name, lists)
        checks.check_list(self._where, name, tensor, parts)
        return parts

    # ---- exchanges ----

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank some rows of ``input``, and fill ``output`` with theirs.

        Split sizes are numbers of rows to and from each rank; empty: equal parts.
        """
        splits = Splits(
            checks.split_bytes(self._where, "all_to_all", input, input_split_sizes),
            checks.split_bytes(self._where, "all_to_all", output, output_split_sizes),
        )
        return self._all_to_all([output], [input], splits, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send each rank a tensor of ``inputs``, and fill ``outputs`` with theirs."""
        for tensors in (outputs, inputs):
            if len(tensors) != self._where.world:
                raise checks.refusal(self._where, "all_to_all", f"{len(tensors)} tensors for")
        splits = Splits([nbytes(one) for one in inputs], [nbytes(one) for one in outputs])
        return self._all_to_all(outputs, inputs, splits, opts)

    def _all_to_all(
        self, outputs: Tensors, inputs: Tensors, splits: Splits, opts: Any
    ) -> dist.Work:
        checks.check_own_split(self._where, "all_to_all", splits.send, splits.receive)
        checks.check_dtypes(self._where, "all_to_all", [*outputs, *inputs])
        detail = str(inputs[0].dtype)
        call = Description(kinds.ALL_TO_ALL, inputs, outputs, detail=detail, splits=splits)
        return self._dispatcher.run(call, opts)

    # ---- point to point ----

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor. The work is done when the receiver has it, or its data is copied.

        docs/messages.md has the guarantees. A receive gets messages of its own tag only.
        """
        return self._point_to_point.post(f"send to {dst}", tensors, dst, tag, fills=False)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from a rank."""
        return self._point_to_point.post(f"receive from {src}", tensors, src, tag, fills=True)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive one tensor from any rank; the work's ``source_rank`` says from which."""
        return self._point_to_point.post("receive", tensors, None, tag, fills=True)

    # ---- works that torch wants as one; torch's own would ask a backend, which refuses ----

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        del device
        self._coalescing.begin()

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        del device
        return self._coalescing.end()

    # ---- barriers ----

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have begun the barrier."""
        return self._dispatcher.run(Description(kinds.BARRIER, [], [], nbytes=1), opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and name missing ones in an OperationTimeout.

        On rank 0 it names the first missing rank, or all of them with ``wait_all_ranks``.

        In a group that continues with the survivors it is their barrier.
        """
        if self._endpoint.options.continues:
            opts = c10d.BarrierOptions()
            if timeout is not None:
                opts.timeout = timeout
            self.barrier(opts).wait()
            return
        timeout = (
            timedelta(seconds=self._endpoint.operations.timeout) if timeout is None else timeout
        )
        monitored_barrier(self._dispatcher, self._group.messages, timeout, wait_all_ranks)

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
        """Make a group of some of this group's ranks; None on ranks outside it.

        Before torch 2.15, torch.distributed.split_group calls this only with an accelerator.
        Arguments that are None take this group's values, or generated ones; ``device_types`` is
        ignored.
        """
        del device_types
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self._where.world:
            raise checks.refusal(self._where, "split_group", f"ranks {list(ranks)} in")
        if self._where.rank not in chosen:
            return None
        self._splits[tuple(chosen)] += 1
        number = self._splits[tuple(chosen)]
        name = group_name or f"{self.group_name}:split:{number}:{chosen}"
        split = LossyProcessGroup(
            SimpleNamespace(
                store=c10d.PrefixStore(f"split/{name}", self._group.store),
                group_rank=chosen.index(self._where.rank),
                group_size=len(chosen),
                timeout=timeout or timedelta(seconds=self._endpoint.operations.timeout),
                group_id=name,
                global_ranks_in_group=[self._global_ranks[rank] for rank in chosen],
                parent=self,
                configured=self._devices.configured(),
            ),
            opts,
        )
        split._set_group_name(name)
        split._set_group_desc(group_desc or f"{self.group_desc}:split:{number}")
        return split

    # ---- life ----

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls for ranks that never take part; zero or less: no limit."""
        self._timeout = timeout
        self._endpoint.operations.timeout = bounded(timeout).total_seconds()
        self._devices.set_timeout(bounded(timeout))

    def shutdown(self) -> None:
        """Leave the group: tell the others, join all threads, free all sockets. Idempotent."""
        self._leave(abort=False)

    def abort(self) -> None:
        """End the group on all ranks: pending calls fail with AbortedError. If the group's members
        can change, :meth:`reconfigure` revives it."""
        text = f"{self._where}: the group was aborted here by abort_process_group"
        self._health.fail(AbortedError(text, peer=self._where.rank), tell=True)
        self._leave(abort=True)

    def _leave(self, *, abort: bool) -> None:
        _living.pop(self._serial, None)
        self._devices.close(abort=abort)
        self._group.close()
        self._dispatcher.lanes.give_back()


serve(LossyProcessGroup)
opaque(LossyProcessGroup)


def _configured(group: LossyProcessGroup) -> Callable[[], str]:
    """A function that tells which backends torch was asked for, such as "cpu:lossy,cuda:lossy". It
    doesn't keep the group, which is to be freed when its last user forgets it."""
    known: Any = weakref.ref(group)
    return lambda: str(dist.distributed_c10d._world.pg_backend_config.get(known(), ""))


def stats_of_all() -> Stats:
    """This rank's figures in all groups that were not destroyed (``lossycoll.stats``)."""
    groups = list(_living.values())
    if not groups:
        of(None)  # which says so
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank = groups[0]._global_ranks[groups[0]._where.rank]
        world = 1 + max(max(each._global_ranks) for each in groups)
    return total(
        [Counted(each.lossy_stats(), each._global_ranks, each._group.socket) for each in groups],
        rank,
        world,
    )


def of(group: dist.ProcessGroup | None) -> LossyProcessGroup:
    """The lossy group behind torch's handle; None: the default group."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, LossyProcessGroup):
        backend = found.name() if isinstance(found, dist.ProcessGroup) else "none"
        raise UnsupportedError(
            f"this needs a group of backend 'lossy', got one of backend {backend!r}; call "
            f"init_process_group or new_group with backend='lossy' first"
        )
    return found

"""Each shard's state kept twice: what a rank has alone, another has a copy of.

A rank's death then costs no state, but for steps since the copy was made; nor does a host's, if
there are others. docs/rejoin.md has the way back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.process_group import of
from lossycoll.errors import CheckpointError, OptionError
from lossycoll.options.scopes import reliable
from lossycoll.train.common.packing import byte_tensor, packed, state_from, unpacked

from . import checkpoint
from .checkpoint import ShardState
from .parameter_store import ParameterStore

TAG: Final = 0x5BA
MOST_BYTES: Final = 1 << 44
NOTHING: Final = -1
FAILED: Final = -2


class ShardBackup:
    """Backup of each rank's shard state at another rank, renewed every ``every`` steps.

    The other rank is of another host, where there is one (:func:`lossycoll.topology`).

    Args:
        optimizer: A ShardedOptimizer.
        every: Number of steps from one copy to the next.

    Raises:
        OptionError: ``every`` isn't a whole number above 0.
    """

    def __init__(self, optimizer: Any, every: int = 10) -> None:
        if type(every) is not int or every < 1:
            raise OptionError(f"every {every!r}: wanted a whole number, 1 or more")
        self._optimizer = optimizer
        self._every = every
        self._group: dist.ProcessGroup = optimizer.group
        self._rank, self._world = dist.get_rank(self._group), dist.get_world_size(self._group)
        hosts = of(self._group).lossy_topology().hosts
        self._to, self._from = partners(hosts, self._rank)
        self._steps = 0
        self._pending: _PendingExchange | None = None
        self._copy: ShardState | None = None

    @property
    def steps(self) -> int:
        """Number of calls of :meth:`step`."""
        return self._steps

    def step(self) -> None:
        """Count an optimizer's step on all ranks, and start a copy when it is due.

        Raises:
            PeerLostError: A neighbour is lost.
            CheckpointError: The state can't be sent.
        """
        self._steps += 1
        if self._world == 1:
            return
        is_due = (self._steps - 1) % self._every == 0
        if is_due and self._pending is not None:
            for work in self._pending.works:
                work.wait()
        self._take()
        if is_due:
            self._begin()

    def own(self) -> ShardState:
        """Return the state that only this rank has, as of now."""
        fragments, options = self._optimizer.shard_state()
        era = self._optimizer.shard_era
        return ShardState(
            era, self._world, self._rank, self._steps, tuple(fragments), tuple(options)
        )

    def neighbours(self) -> ShardState | None:
        """Copy of another rank's state that this rank holds; None: none has come yet."""
        self._take()
        return self._copy

    def _begin(self) -> None:
        skeleton, array = packed(self.own())
        mine = [byte_tensor(skeleton), torch.from_numpy(array)]
        sizes = torch.tensor([part.numel() for part in mine], device="cpu")
        theirs = torch.zeros_like(sizes)
        for work in self._exchange([sizes], [theirs]):
            work.wait()
        lengths = theirs.tolist()
        if not all(0 <= length < MOST_BYTES for length in lengths):
            raise CheckpointError(f"a neighbour's state of {lengths} bytes")
        room = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        self._pending = _PendingExchange(self._exchange(mine, room), mine, room)

    def _exchange(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Any]:
        works: list[Any] = []
        for out, into in zip(mine, theirs, strict=True):
            works.append(dist.isend(out, group=self._group, group_dst=self._to, tag=TAG))
            works.append(dist.irecv(into, group=self._group, group_src=self._from, tag=TAG))
        return works

    def _take(self) -> None:
        """Takes a copy that has come as a whole."""
        pending = self._pending
        if pending is None or not all(work.is_completed() for work in pending.works):
            return
        self._pending = None
        if not all(work.is_success() for work in pending.works):
            return
        skeleton, data = pending.room
        self._copy = ShardState.of_plain(unpacked(skeleton.numpy().tobytes(), data.numpy()))


@dataclass(frozen=True)
class _PendingExchange:
    works: Sequence[Any]
    mine: Sequence[Tensor]
    room: Sequence[Tensor]


def partners(hosts: Sequence[int], rank: int) -> tuple[int, int]:
    """The ranks that hold a rank's copy, and of which it holds one. ``hosts``: of all ranks. They
    are of other hosts as far as there is room: of one that has more ranks than all others together,
    some have theirs at home."""
    order = sorted(range(len(hosts)), key=lambda one: (hosts[one], one))
    largest = max(Counter(hosts).values())
    shift = largest if largest < len(hosts) else 1
    at = order.index(rank)
    return order[(at + shift) % len(hosts)], order[at - shift]


def gathered(backup: ShardBackup | None, group: dist.ProcessGroup | None) -> list[ShardState]:
    """The latest state of each shard of the group that was, by rank; none if no rank was in one.

    All ranks of the new group call this; ``backup`` is None at a rank that was in none.
    """
    mine, failure = [], ""
    if backup is not None:
        try:
            mine = [one for one in (backup.own(), backup.neighbours()) if one is not None]
        except Exception as error:  # as of a tensor that can't be copied: all ranks hear of it
            failure = f"{type(error).__name__}: {error}"
    labels = torch.full((2, 4), FAILED if failure else NOTHING, device="cpu")
    for at, one in enumerate(mine):
        labels[at] = torch.tensor(one.label, device="cpu")
    with reliable():
        table = [torch.zeros_like(labels) for _ in range(dist.get_world_size(group))]
        dist.all_gather(table, labels, group=group)
        rows = [row.tolist() for row in table]
        failed = [at for at, row in enumerate(rows) if row[0][0] == FAILED]
        if failed:
            raise CheckpointError(f"ranks {failed} can't tell their shards' state: {failure}")
        out = []
        for at, which in chosen(rows):
            state = state_from(at, lambda which=which: mine[which], group)  # type: ignore[misc]
            out.append(ShardState.of_plain(unpacked(*state)))
        return out


def chosen(rows: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, int]]:
    """For each rank of the latest group that was: the rank of the new one, and which of its two.

    ``rows`` has, by rank of the new group, the labels of what it has.
    """
    found = [
        (label, (at, which))
        for at, row in enumerate(rows)
        for which, label in enumerate(row)
        if label[0] != NOTHING
    ]
    if not found:
        return []
    latest = max(label[0] for label, _ in found)
    found = [one for one in found if one[0][0] == latest]
    worlds = sorted({label[1] for label, _ in found})
    if len(worlds) != 1:
        raise CheckpointError(f"shards of groups of {worlds} ranks: wanted those of one group")
    best: dict[int, tuple[int, tuple[int, int]]] = {}
    for (_, _, owner, steps), place in found:
        if owner not in best or best[owner][0] < steps:
            best[owner] = steps, place
    missing = sorted(set(range(worlds[0])) - set(best))
    if missing:
        raise CheckpointError(
            f"the state of the shards of ranks {missing} of {worlds[0]} is lost: nobody who is "
            f"left has a copy; begin with a fresh state, or load a checkpoint"
        )
    return [best[owner][1] for owner in sorted(best)]


def assembled(shards: Sequence[ShardState], store: ParameterStore) -> dict[str, Any]:
    """The checkpoint, as ``state_dict()``, of ``shards``, one for each rank of a group."""
    states = checkpoint.assembled(store, (each for shard in shards for each in shard.fragments))
    # Those of a copy may be older than a change that a scheduler has made.
    options_of = max(shards, key=lambda one: one.steps).options
    wanted = len(store.groups.param_groups)
    if len(options_of) != wanted:
        raise CheckpointError(f"{len(options_of)} groups of parameters, wanted {wanted}")
    return store.groups.packed(states, options_of)

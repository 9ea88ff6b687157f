"""Each shard's state kept twice: what a rank has alone, its neighbour has a copy of.

A rank's death then costs no state, but for steps since the copy was made. docs/rejoin.md has the
way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import CheckpointError, OptionError
from lossycoll.options.scopes import reliable
from lossycoll.train.common.packing import packed, unpacked

from .checkpoint import joined, numbered, pack_groups
from .parameter_store import Group, ParameterStore
from .shard_state import FragmentState, ShardState, State

TAG: Final = 0x5BA
MOST_BYTES: Final = 1 << 44


class ShardBackup:
    """Copies the state of each rank's shard to the next rank, now and then.

    Args:
        optimizer: A ShardedOptimizer.
        every: Steps from one copy to the next.

    Raises:
        OptionError: ``every`` is no whole number above 0.
    """

    def __init__(self, optimizer: Any, every: int = 10) -> None:
        if type(every) is not int or every < 1:
            raise OptionError(f"every {every!r}: wanted a whole number, 1 or more")
        self._optimizer = optimizer
        self._every = every
        self._group: dist.ProcessGroup = optimizer.group
        self._rank, self._world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._steps = 0
        self._coming: tuple[list[Any], list[Tensor], list[Tensor]] | None = None
        self.neighbours: ShardState | None = None
        """The copy that this rank holds of the one before it; None: none has come yet."""

    @property
    def steps(self) -> int:
        """How often :meth:`step` was called."""
        return self._steps

    def step(self) -> None:
        """After each step of the optimizer, on all ranks. The copy travels beside the next steps.

        Raises:
            PeerLostError: A neighbour is lost.
        """
        self._steps += 1
        if self._world > 1 and (self._steps - 1) % self._every == 0:
            self._finish()
            self._begin()

    def own(self) -> ShardState:
        """What this rank has alone, now."""
        fragments, options = self._optimizer.shard_state()
        return ShardState(self._rank, self._world, self._steps, tuple(fragments), tuple(options))

    def _begin(self) -> None:
        skeleton, array = packed(self.own().to_plain())
        mine = [torch.tensor(list(skeleton), dtype=torch.uint8), torch.from_numpy(array)]
        sizes = torch.tensor([part.numel() for part in mine])
        theirs = torch.zeros_like(sizes)
        for work in self._exchange([sizes], [theirs]):
            work.wait()
        lengths = theirs.tolist()
        if not all(0 <= length < MOST_BYTES for length in lengths):
            raise CheckpointError(f"a neighbour's state of {lengths} bytes")
        room = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        self._coming = (self._exchange(mine, room), mine, room)

    def _exchange(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Any]:
        after, before = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        works: list[Any] = []
        for out, into in zip(mine, theirs, strict=True):
            works.append(dist.isend(out, group=self._group, group_dst=after, tag=TAG))
            works.append(dist.irecv(into, group=self._group, group_src=before, tag=TAG))
        return works

    def _finish(self) -> None:
        """Takes the copy that has been coming since the last time."""
        if self._coming is None:
            return
        works, _, (skeleton, data) = self._coming
        for work in works:
            work.wait()
        self._coming = None
        plain = unpacked(skeleton.numpy().tobytes(), data.numpy())
        self.neighbours = ShardState.of_plain(plain)


def gathered(backup: ShardBackup | None, group: dist.ProcessGroup | None) -> list[ShardState]:
    """The latest state of each shard that any rank of a new group has. All ranks call this.

    Args:
        backup: Of the group that was; None: this rank wasn't in it.
        group: The new one.

    Returns:
        One for each rank of the group that was, by rank.

    Raises:
        CheckpointError: A shard's owner is gone, and whoever had its copy as well; on all ranks.
    """
    mine = []
    if backup is not None:
        mine = [one for one in (backup.own(), backup.neighbours) if one is not None]
    skeleton, array = packed([one.to_plain() for one in mine])
    parts = [torch.tensor(list(skeleton), dtype=torch.uint8), torch.from_numpy(array)]
    found: list[ShardState] = []
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with reliable():
        sizes = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([part.numel() for part in parts]), group=group)
        for at, lengths in enumerate(sizes):
            texts = []
            for part, length in zip(parts, lengths.tolist(), strict=True):
                text = part if at == rank else torch.empty(length, dtype=torch.uint8)
                if length:
                    dist.broadcast(text, group=group, group_src=at)
                texts.append(text)
            plain = unpacked(texts[0].numpy().tobytes(), texts[1].numpy())
            found += [ShardState.of_plain(one) for one in plain]
    return latest(found)


def latest(found: Sequence[ShardState]) -> list[ShardState]:
    """The latest of each rank's.

    Args:
        found: Of any ranks of one group, owners' and copies.

    Returns:
        One for each rank, by rank.

    Raises:
        CheckpointError: There is none of some rank, or they are of different groups.
    """
    worlds = {one.world for one in found}
    if len(worlds) != 1:
        raise CheckpointError(
            f"states of shards of groups of {sorted(worlds)} ranks: wanted those of one group"
        )
    (world,) = worlds
    newest: dict[int, ShardState] = {}
    for one in found:
        if one.rank not in newest or newest[one.rank].steps < one.steps:
            newest[one.rank] = one
    missing = sorted(set(range(world)) - set(newest))
    if missing:
        raise CheckpointError(
            f"the state of the shards of ranks {missing} of {world} is lost: nobody who is left "
            f"has a copy; begin with a fresh state, or load a checkpoint"
        )
    return [newest[rank] for rank in range(world)]


def assembled(
    shards: Sequence[ShardState], store: ParameterStore, groups: Sequence[Group]
) -> dict[str, Any]:
    """A checkpoint of what the ranks of a group had, each for itself.

    Args:
        shards: One for each rank of that group.
        store: The parameters, in any group.
        groups: The model's groups.

    Returns:
        As ``state_dict()`` has it.

    Raises:
        CheckpointError: They are another model's.
    """
    by_index: dict[int, list[FragmentState]] = {}
    for shard in shards:
        for each in shard.fragments:
            by_index.setdefault(each.index, []).append(each)
    members = {m.index: m for shard in store.shards for m in shard.bucket.members}
    elementwise = set(store.elementwise)
    out: dict[Tensor, State] = {}
    for index, states in by_index.items():
        member = members.get(index)
        length = sum(each.end - each.begin for each in states)
        if member is None or length != member.end - member.begin:
            raise CheckpointError(
                f"shards have {length} elements of parameter {index}, and the model has "
                f"{0 if member is None else member.end - member.begin}; it is another model's"
            )
        for each in states:
            elementwise |= {key for key in each.state if each.has_elements(key, elementwise)}
        out[store.model[index]] = joined(member, states, elementwise)
    options_of = shards[0].options
    if len(options_of) != len(groups):
        raise CheckpointError(f"{len(options_of)} groups of parameters, wanted {len(groups)}")
    packed = pack_groups([{**given, "params": []} for given in options_of], groups)
    return {"state": numbered(out, groups), "param_groups": packed}

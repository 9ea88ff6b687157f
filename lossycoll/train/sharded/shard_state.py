"""What one rank of a sharded optimizer has alone, as it travels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lossycoll.errors import CheckpointError

State = dict[str, Any]


@dataclass(frozen=True)
class FragmentState:
    """The optimizer's state of one fragment, as one rank sends it to another."""

    index: int
    """Of the model's parameter."""
    begin: int
    """The first of its elements, in the order of memory."""
    end: int  # after the last of its elements
    state: State  # by name, tensors on the CPU

    def has_elements(self, key: str, elementwise: Collection[str]) -> bool:
        """Whether a state has an entry for each element, and is cut like the parameter.

        Of a single element the shape can't tell, and ``elementwise`` must.
        """
        value, length = self.state[key], self.end - self.begin
        each = isinstance(value, Tensor) and value.shape == (length,)
        return each and (length > 1 or key in elementwise)


@dataclass(frozen=True)
class ShardState:
    """The state that one rank of a group has alone."""

    era: int  # how often shards had been restored before that group was made
    world: int  # the group's ranks
    rank: int  # the owner's, in that group
    steps: int  # calls of ``ShardBackup.step`` before it was taken
    fragments: tuple[FragmentState, ...] = ()  # state by fragment
    # of each group of parameters, as a learning rate that was changed
    options: tuple[Mapping[str, Any], ...] = ()

    @property
    def label(self) -> tuple[int, int, int, int]:
        """All but the state."""
        return self.era, self.world, self.rank, self.steps

    def to_plain(self) -> list[Any]:
        """As what ``packed`` takes."""
        fragments = [[one.index, one.begin, one.end, one.state] for one in self.fragments]
        return [*self.label, fragments, [dict(one) for one in self.options]]

    @classmethod
    def of_plain(cls, plain: Any) -> ShardState:
        """Reads what :meth:`to_plain` has written; CheckpointError if it is something else."""
        try:
            *label, fragments, options = plain
            era, world, rank, steps = label
            states = tuple(FragmentState(*one) for one in fragments)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"no state of a shard: {error}") from None
        numbers = [era, world, rank, steps, *(n for s in states for n in (s.index, s.begin, s.end))]
        sound = all(type(number) is int and number >= 0 for number in numbers) and rank < world
        sound = sound and all(one.begin <= one.end for one in states)
        sound = sound and all(isinstance(one.state, dict) for one in states)
        if not (sound and isinstance(options, list) and all(isinstance(o, dict) for o in options)):
            raise CheckpointError(f"no state of a shard: {numbers[:4]}")
        return cls(era, world, rank, steps, states, tuple(options))

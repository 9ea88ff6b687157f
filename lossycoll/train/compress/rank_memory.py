"""What one rank remembers of all its gradients between steps, and how that is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lossycoll.errors import CheckpointError

from .error_memory import RULES, ErrorMemory, memory_of


@dataclass
class RankMemory:
    """The memories of one rank's gradients, by the gradient's key."""

    rule: str  # that of error feedback
    momentum: float  # that of the rule ``ef21m``
    matrices: dict[str, ErrorMemory] = field(default_factory=dict)
    """Of gradients whose rows are chosen."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """What was lost of gradients that are sent whole, to be added to the next ones."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of all gradients so far."""

    def of(self, key: str) -> ErrorMemory:
        """The memory of a gradient, by its key; an empty one if there is none yet."""
        memory = self.matrices.get(key)
        if memory is None:
            memory = self.matrices[key] = memory_of(self.rule, self.momentum)
        return memory

    def remembered(self) -> list[tuple[str, tuple[int, ...]]]:
        """Keys and shapes of the matrices of which something is remembered, in order."""
        begun = {key for key, memory in self.matrices.items() if memory.tensors}
        return [(key, shape) for key, shape in sorted(self.shapes.items()) if key in begun]

    def nbytes(self) -> int:
        """Bytes of all tensors that are remembered."""
        tensors = [t for memory in self.matrices.values() for t in memory.tensors.values()]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self.residuals.values()))

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that is remembered, for :meth:`from_state_dict`."""
        return {
            "memories": {key: _copied(memory.tensors) for key, memory in self.matrices.items()},
            "shapes": dict(self.shapes),
            "owed": _copied(self.residuals),
        }

    @classmethod
    def from_state_dict(
        cls, rule: str, momentum: float, state_dict: Mapping[str, Any]
    ) -> RankMemory:
        """A memory with copies of the tensors saved by :meth:`state_dict`; ``rule`` is today's.

        CheckpointError: the tensors are another rule's.
        """
        found = cls(rule, momentum)
        names = RULES[rule].names
        for key, tensors in state_dict["memories"].items():
            if tensors and set(tensors) != set(names):
                raise CheckpointError(
                    f"the state of {key!r} has {', '.join(tensors)}, wanted {', '.join(names)}"
                )
            found.of(key).tensors = _copied(tensors)
        found.shapes = dict(state_dict["shapes"])
        found.residuals = _copied(state_dict["owed"])
        return found


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}

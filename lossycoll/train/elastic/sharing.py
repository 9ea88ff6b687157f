"""One rank's state for all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lossycoll.options.scopes import reliable
from lossycoll.train.common.packing import Bytes, state_from, unpacked


class Stateful(Protocol):
    """Object that has a state: modules, optimizers, schedulers."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state, as torch's."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what it had, as torch's."""


def share(parts: Sequence[Stateful], source: int) -> dict[int, str]:
    """Gives all ranks of the default group the source's state; ``parts`` are the same ones on all.

    Returns the ranks that couldn't take it, the same on all; at each of them also why. A state that
    can't travel raises CheckpointError on all ranks.
    """
    skeleton, data = state_from(source, lambda: [part.state_dict() for part in parts])
    own = dist.get_rank() == source
    return _told("" if own else _loaded(parts, skeleton, data))


def _loaded(parts: Sequence[Stateful], skeleton: bytes, data: Bytes) -> str:
    """Why it couldn't be loaded; empty if it was."""
    try:
        states = unpacked(skeleton, data, copies=True)
        if not isinstance(states, list) or len(states) != len(parts):
            return f"{len(states)} states came, and {len(parts)} parts are here"
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    except Exception as error:  # of a user's class, whatever it is: all ranks hear of it
        return f"{type(error).__name__}: {error}"
    return ""


def _told(failed: str) -> dict[int, str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    told = torch.zeros(world, dtype=torch.uint8, device="cpu")
    told[rank] = bool(failed)
    with reliable():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return {one: failed if one == rank else "" for one in told.nonzero().flatten().tolist()}

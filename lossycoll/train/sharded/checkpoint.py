"""Optimizer state between fragments and whole parameters.

A checkpoint has the format of the plain optimizer's ``state_dict()``: by parameter, whole tensors,
whatever the number of ranks that wrote it. With error feedback it also has the residuals of the
ranks that wrote it; a plain optimizer doesn't look there.

An element-wise optimizer's state has, by its name, an entry for each element of all parameters or
of none. One that steps whole parameters may hold a row of each matrix, which has the shape of a
matrix of one row: its state is judged by each parameter's own shape, and stays as it is otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossycoll.errors import CheckpointError
from lossycoll.train.common.layout import BucketMember, Fragment

from .parameter_store import OwnedFragment, ParameterStore, options, owners_needed

State = dict[str, Any]
log: Final = logging.getLogger("lossycoll")


class FragmentState(NamedTuple):
    """The optimizer's state of one fragment, as one rank sends it to another."""

    parameter: int  # its index in the model
    begin: int  # the first of its elements, in the order of memory
    end: int  # after the last of its elements
    state: State  # by name, tensors on the CPU

    def has_elements(self, key: str, elementwise: Collection[str]) -> bool:
        """True if a state has an entry for each element; of a single one, ``elementwise`` tells."""
        value, length = self.state[key], self.end - self.begin
        each = isinstance(value, Tensor) and value.shape == (length,)
        return each and (length > 1 or key in elementwise)


class ShardState(NamedTuple):
    """The state that one rank of a group has alone."""

    era: int  # how often shards had been restored before that group was made
    world: int  # the group's ranks
    rank: int  # the owner's, in that group
    steps: int  # calls of ``ShardBackup.step`` before it was taken
    fragments: tuple[FragmentState, ...] = ()  # state by fragment
    # of each group of parameters, as a learning rate that was changed
    options: tuple[Mapping[str, Any], ...] = ()

    @property
    def label(self) -> tuple[int, ...]:
        return self[:4]

    @classmethod
    def of_plain(cls, plain: Any) -> ShardState:
        """The state that a peer has sent as a tuple."""
        try:
            found = cls(*plain)
            states = tuple(FragmentState(*one) for one in found.fragments)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"no state of a shard: {error}") from None
        numbers = [*found.label, *(number for state in states for number in state[:3])]
        sound = all(type(number) is int and number >= 0 for number in numbers)
        sound = sound and found.rank < found.world and all(one.begin <= one.end for one in states)
        sound = sound and all(isinstance(one.state, dict) for one in states)
        sound = sound and isinstance(found.options, tuple)
        if not (sound and all(isinstance(one, dict) for one in found.options)):
            raise CheckpointError(f"no state of a shard: {found.label}")
        return found._replace(fragments=states)


RESIDUALS: Final = "error_feedback"
"""The key of the residuals, by the parameter's number: the mean over the ranks, without scale."""


def states_of(owned: Sequence[OwnedFragment], state: Mapping[Any, State]) -> list[FragmentState]:
    """The states of fragments that have one, to be sent: copies on the CPU."""
    return [
        state_of(each.fragment, found) for each in owned if (found := state.get(each.parameter))
    ]


def state_of(fragment: Fragment, state: Mapping[str, Any]) -> FragmentState:
    begin = fragment.offset
    saved = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
    return FragmentState(fragment.member.index, begin, begin + fragment.end - fragment.begin, saved)


def assembled(store: ParameterStore, states: Iterable[FragmentState]) -> dict[Tensor, State]:
    """The state of whole parameters, of all their fragments'. CheckpointError: these don't fit."""
    by_index: dict[int, list[FragmentState]] = {}
    elementwise = set(store.elementwise)
    for each in states:
        by_index.setdefault(each.parameter, []).append(each)
        if not store.settings.whole:
            elementwise |= {key for key in each.state if each.has_elements(key, elementwise)}
    members = {m.index: m for shard in store.shards for m in shard.bucket.members}
    out: dict[Tensor, State] = {}
    for index, found in by_index.items():
        member = members.get(index)
        length = sum(each.end - each.begin for each in found)
        wanted = 0 if member is None else member.end - member.begin
        if member is None or max(each.end for each in found) > wanted or length > wanted:
            raise CheckpointError(
                f"shards have {length} elements of parameter {index}, and the model has {wanted}; "
                f"it is another model's"
            )
        if length < wanted:
            log.warning(
                "%s begins with a fresh state: it had none when the copy of a lost shard was made",
                store.names[index],
            )
            continue
        out[store.model[index]] = joined(member, found, elementwise, whole=store.settings.whole)
    return out


def joined(
    member: BucketMember,
    states: Sequence[FragmentState],
    elementwise: Collection[str],
    *,
    whole: bool = False,
) -> State:
    """The state of a whole parameter, of those of all its fragments. With ``whole`` of the one
    fragment that it is, whose state has any shape unless ``elementwise`` names it."""
    out: State = {}
    for each in states:
        for key, value in each.state.items():
            as_it_is = whole and key not in elementwise
            if as_it_is or not each.has_elements(key, elementwise):
                out.setdefault(key, value)
                continue
            if key not in out:
                out[key] = torch.empty_strided(
                    member.shape, member.stride, dtype=value.dtype, device="cpu"
                )
            out[key].as_strided((member.end - member.begin,), (1,))[each.begin : each.end] = value
    return out


def part_of(
    fragment: Fragment,
    state: Mapping[str, Any],
    elementwise: Collection[str],
    device: torch.device | None = None,
) -> State:
    """A fragment's part of a whole parameter's state, on ``device``; None: in host memory."""
    member, out = fragment.member, {}
    for key, value in state.items():
        is_tensor = isinstance(value, Tensor)
        each = is_tensor and key in elementwise
        if fragment.whole:
            each = is_tensor and value.shape == member.shape and bool(member.shape)
        if not each:
            out[key] = value.clone() if is_tensor else value
            continue
        part = torch.empty_strided(member.shape, member.stride, dtype=value.dtype, device="cpu")
        part.copy_(value)
        if not fragment.whole:
            length = fragment.end - fragment.begin
            part = part.as_strided((length,), (1,), fragment.offset).clone()
        out[key] = part.to(device=device)
    return out


def check_state(
    state: Mapping[str, Any], shape: tuple[int, ...], elementwise: Collection[str], name: str
) -> None:
    for key, value in state.items():
        each = isinstance(value, Tensor) and key in elementwise
        if each and tuple(value.shape) != shape:
            raise CheckpointError(
                f"the checkpoint's {key} of {name} has shape {tuple(value.shape)}, wanted "
                f"{shape}; it is another model's, or its parameters are in another order"
            )


def elementwise_of(states: Mapping[Any, State], known: Collection[str]) -> frozenset[str]:
    """``known``, and the names of what has an entry for each element of some parameter.

    An option that was changed in training may have added state that a trial didn't see.
    """
    return frozenset(known) | {
        key
        for parameter, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape == parameter.shape
    }


# ---- whole checkpoints ----


def save(
    store: ParameterStore, inner: Optimizer, residuals: Sequence[Tensor] | None, to: int
) -> dict[str, Any] | None:
    """The result of ``state_dict()`` at rank ``to``; None elsewhere. All ranks must call this."""
    gathered: list[FragmentState] = []
    for shard in store.shards:
        rows = store.collectives.gather_objects(states_of(shard.owned, inner.state), to)
        gathered += chain.from_iterable(rows or ())
    kept = None if residuals is None else consolidate_residuals(store, residuals, to)
    if store.collectives.rank != to:
        return None
    states = assembled(store, gathered)
    states |= {parameter: found for parameter, found in store.frozen.items() if found}
    out = store.groups.packed(states, inner.param_groups)
    if kept is not None:
        out[RESIDUALS] = store.groups.packed(kept, inner.param_groups)["state"]
    return out


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint, checked against the parameters that it is loaded for."""

    states: Mapping[Tensor, State]  # states by the model's parameter
    groups: Sequence[Mapping[str, Any]]  # with the options that were in force
    elementwise: Collection[str]  # names of the state that has an entry for each element
    residuals: Mapping[int, Tensor]  # residuals by the index of the parameter


def read(state_dict: Mapping[str, Any], store: ParameterStore) -> Checkpoint:
    """The checkpoint of a ``state_dict()``; CheckpointError if groups or shapes don't fit."""
    numbers = _numbers(state_dict, store)
    saved, lost = state_dict["state"], state_dict.get(RESIDUALS, {})
    states = {parameter: saved[n] for parameter, n in numbers.items() if n in saved}
    elementwise = elementwise_of(states, store.elementwise)
    residuals: dict[int, Tensor] = {}
    for index, (parameter, name) in enumerate(zip(store.model, store.names, strict=True)):
        shape = tuple(parameter.shape)
        # Of whole parameters nothing tells which shape their state has: a factor's, maybe.
        if not store.settings.whole:
            check_state(states.get(parameter, {}), shape, elementwise, name)
        value = lost.get(numbers[parameter])
        if value is None:
            continue
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != shape:
            raise CheckpointError(
                f"{store.collectives}: the checkpoint's {RESIDUALS} of {name} has shape {found}, "
                f"wanted {shape}; it is another model's"
            )
        if bool(value.any()):
            residuals[index] = value
    return Checkpoint(states, state_dict["param_groups"], elementwise, residuals)


def deal(
    checkpoint: Checkpoint, fragments: Sequence[Mapping[str, Any]], store: ParameterStore
) -> dict[str, Any]:
    """The ``state_dict()`` that this rank's inner optimizer loads of a checkpoint."""
    owned = {each.parameter: each for each in store.owned}
    local: dict[int, State] = {}
    groups, count = [], 0
    for mine, saved in zip(fragments, checkpoint.groups, strict=True):
        numbers = list(range(count, count + len(mine["params"])))
        count += len(numbers)
        for number, fragment in zip(numbers, mine["params"], strict=True):
            each = owned[fragment]
            found = checkpoint.states.get(store.model[each.index])
            if found is not None:
                local[number] = part_of(each.fragment, found, checkpoint.elementwise)
        groups.append({**options(saved), "params": numbers})
    return {"state": local, "param_groups": groups}


def _numbers(state_dict: Mapping[str, Any], store: ParameterStore) -> dict[Tensor, int]:
    """The checkpoint's number of each parameter; CheckpointError if groups don't fit."""
    where = store.collectives
    fits = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= set(state_dict)
    if fits:
        entries = [*state_dict["param_groups"], *state_dict["state"].values()]
        fits = all(isinstance(entry, Mapping) for entry in entries)
        fits = fits and all("params" in group for group in state_dict["param_groups"])
    if not fits:
        raise CheckpointError(
            f"{where}: the checkpoint has {sorted(map(str, state_dict))}, wanted state (a dict by "
            f"number) and param_groups (dicts with params), as an optimizer's state_dict() has them"
        )
    numbers, parameters = (
        [group["params"] for group in groups]
        for groups in (state_dict["param_groups"], store.groups.param_groups)
    )
    found, wanted = [len(group) for group in numbers], [len(group) for group in parameters]
    if found != wanted:
        raise CheckpointError(
            f"{where}: the checkpoint has {sum(found)} parameters in groups of {found}, wanted "
            f"{sum(wanted)} in groups of {wanted}; make the optimizer with the parameters and "
            f"groups that it was saved with"
        )
    for key in ("state", RESIDUALS):
        strays = set(state_dict.get(key, ())).difference(*numbers)
        if strays:
            raise CheckpointError(
                f"{where}: the checkpoint has {key} of parameters {sorted(strays)[:8]}, which are "
                f"in none of its groups; it is damaged, and nothing was loaded"
            )
    return dict(zip(chain(*parameters), chain(*numbers), strict=True))


def consolidate_residuals(
    store: ParameterStore, residuals: Sequence[Tensor], to: int
) -> dict[Tensor, Tensor]:
    """The mean over the ranks of their residuals, by parameter at rank ``to``; empty elsewhere."""
    out: dict[Tensor, Tensor] = {}
    for shard, flat in zip(store.shards, residuals, strict=True):
        mean = flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        with owners_needed():
            store.collectives.all_reduce(mean).wait()
        mean = mean.div_(store.collectives.world).cpu()
        for member in shard.bucket.members if store.collectives.rank == to else ():
            out[store.model[member.index]] = member.view(mean).clone()
    return out

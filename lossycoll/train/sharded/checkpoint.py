"""Optimizer state between fragments and whole parameters.

A checkpoint has the format of the plain optimizer's ``state_dict()``: by parameter, whole tensors,
whatever the number of ranks that wrote it. With error feedback it also has the residuals of the
ranks that wrote it; a plain optimizer doesn't look there.

An element-wise optimizer's state has, by its name, an entry for each element of all parameters or
of none. One that steps whole parameters may hold a row of each matrix, which has the shape of a
matrix of one row: its state is judged by each parameter's own shape, and stays as it is otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lossycoll.errors import CheckpointError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.layout import BucketMember, Fragment

from .parameter_store import Group, ParameterStore, options
from .refusals import owners_needed

State = dict[str, Any]


@dataclass(frozen=True)
class FragmentState:
    """The optimizer's state of one fragment, as one rank sends it to another."""

    index: int  # index of the model's parameter
    begin: int  # the first of its elements, in the order of memory
    end: int  # after the last of its elements
    state: State  # by name, tensors on the CPU

    def has_elements(self, key: str, elementwise: Collection[str]) -> bool:
        """True if a state has an entry for each element; of a single one, ``elementwise`` tells."""
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
        return self.era, self.world, self.rank, self.steps

    def to_plain(self) -> list[Any]:
        fragments = [[one.index, one.begin, one.end, one.state] for one in self.fragments]
        return [*self.label, fragments, [dict(one) for one in self.options]]

    @classmethod
    def of_plain(cls, plain: Any) -> ShardState:
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


_Of = TypeVar("_Of", bound=Tensor)
RESIDUALS: Final = "error_feedback"
"""The key of the residuals, by the parameter's number: the mean over the ranks, without scale."""


def state_of(fragment: Fragment, state: Mapping[str, Any]) -> FragmentState:
    """A fragment's state, to be sent: copies on the CPU."""
    begin = fragment.offset
    saved = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
    return FragmentState(fragment.member.index, begin, begin + fragment.end - fragment.begin, saved)


def widened(elementwise: Collection[str], states: Sequence[FragmentState]) -> frozenset[str]:
    """``elementwise``, and the names of what has an entry for each element of some fragment."""
    found = frozenset(elementwise)
    for each in states:
        found |= {key for key in each.state if each.has_elements(key, found)}
    return found


def joined(
    member: BucketMember,
    states: Sequence[FragmentState],
    elementwise: Collection[str],
    *,
    whole: bool = False,
) -> State:
    """The state of a whole parameter, of those of all its fragments. With ``whole`` of the one
    fragment that it is, whose state has any shape unless ``elementwise`` names it."""
    length = member.end - member.begin
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
            out[key].as_strided((length,), (1,))[each.begin : each.end] = value
    assert sum(each.end - each.begin for each in states) == length, (member, states)
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
        each = isinstance(value, Tensor) and key in elementwise
        if fragment.whole:
            each = isinstance(value, Tensor) and value.shape == member.shape and bool(member.shape)
        if not each:
            out[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        whole = torch.empty_strided(member.shape, member.stride, dtype=value.dtype, device="cpu")
        flat = whole.copy_(value).as_strided((member.end - member.begin,), (1,))
        if fragment.whole:
            out[key] = whole.to(device=device)
            continue
        part = flat[fragment.offset : fragment.offset + fragment.end - fragment.begin].clone()
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


def elementwise_of(
    states: Mapping[_Of, Mapping[str, Any]], known: Collection[str]
) -> frozenset[str]:
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
    collectives: Collectives,
    store: ParameterStore,
    inner: Optimizer,
    groups: Sequence[Group],
    residuals: Sequence[Tensor] | None,
    to: int,
) -> dict[str, Any] | None:
    """The result of ``state_dict()`` at rank ``to``; None elsewhere. All ranks must call this."""
    out: dict[str, Any] | None = None
    state = consolidate(collectives, store, inner.state, to)
    if state is not None:
        packed = pack_groups(inner.param_groups, groups)
        out = {"state": numbered(state, groups), "param_groups": packed}
    if residuals is not None:
        found = consolidate_residuals(collectives, store, residuals, to)
        if out is not None:
            out[RESIDUALS] = numbered(found, groups)
    return out


def consolidate(
    collectives: Collectives, store: ParameterStore, state: Mapping[Any, State], to: int
) -> dict[Tensor, State] | None:
    """The state of all parameters at rank ``to``; None elsewhere. ``state`` is by fragment."""
    gathered: list[tuple[BucketMember, list[FragmentState]]] = []
    elementwise = store.elementwise
    for shard in store.shards:
        mine = [
            state_of(each.fragment, found)
            for each in shard.owned
            if (found := state.get(each.parameter))
        ]
        states = [each for row in collectives.gather_objects(mine, to) or [] for each in row]
        if not store.whole:
            elementwise = widened(elementwise, states)
        gathered += [
            (member, of)
            for member in shard.bucket.members
            if (of := [each for each in states if each.index == member.index])
        ]
    out: dict[Tensor, State] = {
        store.model[member.index]: joined(member, of, elementwise, whole=store.whole)
        for member, of in gathered
    }
    out |= {parameter: found for parameter, found in store.frozen.items() if found}
    return out if collectives.rank == to else None


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint, checked against the parameters that it is loaded for."""

    states: Mapping[Tensor, State]  # states by the model's parameter
    groups: Sequence[Mapping[str, Any]]  # with the options that were in force
    elementwise: Collection[str]  # names of the state that has an entry for each element
    residuals: Mapping[int, Tensor]  # residuals by the index of the parameter


def read(
    state_dict: Mapping[str, Any], groups: Sequence[Group], store: ParameterStore, where: str
) -> Checkpoint:
    """The checkpoint of a ``state_dict()``; CheckpointError if groups or shapes don't fit."""
    states = by_parameter(state_dict, groups, where)
    elementwise = elementwise_of(states, store.elementwise)
    # Of whole parameters nothing tells which shape their state has: a factor's, maybe.
    checked = () if store.whole else zip(store.model, store.names, strict=True)
    for parameter, name in checked:
        check_state(states.get(parameter, {}), tuple(parameter.shape), elementwise, name)
    residuals = residuals_of(state_dict, groups, store, where)
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


def by_parameter(
    state_dict: Mapping[str, Any], groups: Sequence[Group], where: str
) -> dict[Tensor, State]:
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
    saved = state_dict["param_groups"]
    found = [len(group["params"]) for group in saved]
    wanted = [len(group["params"]) for group in groups]
    if found != wanted:
        raise CheckpointError(
            f"{where}: the checkpoint has {sum(found)} parameters in groups of {found}, wanted "
            f"{sum(wanted)} in groups of {wanted}; make the optimizer with the parameters and "
            f"groups that it was saved with"
        )
    strays = set(state_dict["state"]) - {n for group in saved for n in group["params"]}
    if strays:
        raise CheckpointError(
            f"{where}: the checkpoint has state of parameters {sorted(strays)[:8]}, which are in "
            f"none of its groups; it is damaged, and nothing was loaded"
        )
    parameters = (parameter for group in groups for parameter in group["params"])
    numbers = (number for group in saved for number in group["params"])
    return {
        parameter: state_dict["state"][number]
        for parameter, number in zip(parameters, numbers, strict=True)
        if number in state_dict["state"]
    }


# ---- residuals ----


def consolidate_residuals(
    collectives: Collectives, store: ParameterStore, residuals: Sequence[Tensor], to: int
) -> dict[Tensor, Tensor]:
    """The mean over the ranks of their residuals, by parameter at rank ``to``; empty elsewhere."""
    out: dict[Tensor, Tensor] = {}
    for shard, flat in zip(store.shards, residuals, strict=True):
        mean = flat.to(torch.promote_types(flat.dtype, torch.float32))
        with owners_needed():
            collectives.all_reduce(mean, dist.ReduceOp.SUM).wait()
        mean = mean.div_(collectives.world).cpu()
        for member in shard.bucket.members if collectives.rank == to else ():
            whole = torch.empty_strided(member.shape, member.stride, dtype=mean.dtype, device="cpu")
            whole.as_strided((member.end - member.begin,), (1,)).copy_(
                mean[member.begin : member.end]
            )
            out[store.model[member.index]] = whole
    return out


def residuals_of(
    state_dict: Mapping[str, Any], groups: Sequence[Group], store: ParameterStore, where: str
) -> dict[int, Tensor]:
    """Each rank's residuals, by index, after loading: the mean of those that were saved."""
    given = dict(state_dict.get(RESIDUALS, {}))
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    places = {parameter: index for index, parameter in enumerate(store.model)}
    out: dict[int, Tensor] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        value = given.pop(number, None)
        if value is None or parameter not in places:
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{where}: the checkpoint's {RESIDUALS} of {store.name(places[parameter])} has "
                f"shape {shape}, wanted {tuple(parameter.shape)}; it is another model's"
            )
        if bool(value.any()):
            out[places[parameter]] = value
    if given:
        raise CheckpointError(
            f"{where}: the checkpoint has {RESIDUALS} of parameters {sorted(given)[:8]}, which are "
            f"in none of its groups; it is damaged, and nothing was loaded"
        )
    return out


# ---- numbers ----


def pack_groups(fragments: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """Groups as a plain optimizer's ``state_dict`` has them, numbers in place of parameters."""
    numbers = _numbers(groups)
    out = []
    for mine, given in zip(fragments, groups, strict=True):
        packed = options(mine)
        if "param_names" in given:
            packed["param_names"] = given["param_names"]
        out.append({**packed, "params": [numbers[p] for p in given["params"]]})
    return out


_Entry = TypeVar("_Entry")


def numbered(states: Mapping[Tensor, _Entry], groups: Sequence[Group]) -> dict[int, _Entry]:
    numbers = _numbers(groups)
    by_number = {numbers[parameter]: state for parameter, state in states.items()}
    return dict(sorted(by_number.items()))


def _numbers(groups: Sequence[Group]) -> dict[Tensor, int]:
    """Torch's number of each parameter; one that comes twice has its first number."""
    out: dict[Tensor, int] = {}
    start = 0
    for group in groups:
        for place, parameter in enumerate(group["params"], start):
            out.setdefault(parameter, place)
        start += len(group["params"])
    return out

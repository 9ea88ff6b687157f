"""Optimizer state between fragments and whole parameters.

A checkpoint has the format of the plain optimizer's ``state_dict()``: by parameter, whole tensors,
whatever the number of ranks that wrote it. Beside it is, with error feedback, what the ranks that
wrote it still owe; a plain optimizer doesn't look there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import CheckpointError
from lossycoll.train.common.collectives import Exchange
from lossycoll.train.common.layout import Fragment, Member

from .parameter_store import Group, Held, options

State = dict[str, Any]
_Of = TypeVar("_Of", bound=Tensor)
OWED: Final = "error_feedback"
"""The key of what is owed, by the parameter's number: the mean over the ranks, without scale."""


@dataclass(frozen=True)
class FragmentState:
    """What a rank tells of its fragment of a parameter: elements ``begin`` to ``end`` of that, in
    the order of memory, and their ``state``."""

    index: int
    begin: int
    end: int
    state: State

    def has_elements(self, key: str, elementwise: Collection[str]) -> bool:
        """Whether state ``key`` has an entry for each element. Of a single element the shape can't
        tell, and the name must."""
        value, length = self.state[key], self.end - self.begin
        each = isinstance(value, Tensor) and value.shape == (length,)
        return each and (length > 1 or key in elementwise)


def state_of(fragment: Fragment, state: Mapping[str, Any]) -> FragmentState:
    """``state``: of ``fragment``."""
    begin = fragment.offset
    held = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
    return FragmentState(fragment.member.index, begin, begin + fragment.end - fragment.begin, held)


def joined(member: Member, states: Sequence[FragmentState], elementwise: Collection[str]) -> State:
    """The state of a whole parameter from those of all of its fragments. ``elementwise``: names of
    what has an entry for each element."""
    length = member.end - member.begin
    out: State = {}
    for told in states:
        for key, value in told.state.items():
            if not told.has_elements(key, elementwise):
                out.setdefault(key, value)
                continue
            if key not in out:
                out[key] = torch.empty_strided(member.shape, member.stride, dtype=value.dtype)
            out[key].as_strided((length,), (1,))[told.begin : told.end] = value
    assert sum(told.end - told.begin for told in states) == length, (member, states)
    return out


def part_of(fragment: Fragment, state: Mapping[str, Any], elementwise: Collection[str]) -> State:
    """What the fragment has of a whole parameter's state, which :func:`check_state` has passed.

    ``elementwise``: names of what has an entry for each element.
    """
    member, out = fragment.member, {}
    for key, value in state.items():
        if not (isinstance(value, Tensor) and key in elementwise):
            out[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        whole = torch.empty_strided(member.shape, member.stride, dtype=value.dtype)
        flat = whole.copy_(value).as_strided((member.end - member.begin,), (1,))
        out[key] = flat[fragment.offset : fragment.offset + fragment.end - fragment.begin].clone()
    return out


def check_state(
    state: Mapping[str, Any], shape: tuple[int, ...], elementwise: Collection[str], name: str
) -> None:
    """Raises CheckpointError, naming the parameter, if ``state`` isn't that of one of ``shape``."""
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
    """``known``, and names of what has an entry for each element of some parameter: an option that
    was changed in training may have added state that a trial didn't see."""
    return frozenset(known) | {
        key
        for parameter, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape == parameter.shape
    }


# ---- whole checkpoints ----


def consolidate(
    exchange: Exchange, held: Held, state: Mapping[Any, State], to: int
) -> dict[Tensor, State] | None:
    """The state of all parameters, by parameter, at rank ``to``; None elsewhere.

    ``state``: the inner optimizer's, by fragment. Bucket by bucket, so that what travels at once is
    bounded.
    """
    told: list[tuple[Member, list[FragmentState]]] = []
    elementwise = set(held.elementwise)
    for shard in held.shards:
        mine = [
            state_of(each.fragment, found)
            for each in shard.owned
            if (found := state.get(each.parameter))
        ]
        states = [each for row in exchange.tell(mine, to) or [] for each in row]
        for each in states:
            elementwise |= {key for key in each.state if each.has_elements(key, elementwise)}
        told += [
            (member, of)
            for member in shard.bucket.members
            if (of := [each for each in states if each.index == member.index])
        ]
    out: dict[Tensor, State] = {
        held.model[member.index]: joined(member, of, elementwise) for member, of in told
    }
    out |= {parameter: found for parameter, found in held.frozen.items() if found}
    return out if exchange.rank == to else None


def deal(
    states: Mapping[Tensor, State],
    saved: Sequence[Mapping[str, Any]],
    fragments: Sequence[Mapping[str, Any]],
    held: Held,
    elementwise: Collection[str],
) -> dict[str, Any]:
    """What this rank's inner optimizer loads of a checkpoint: ``states`` by parameter, and its
    groups ``saved``. ``fragments``: the inner optimizer's groups. ``elementwise``: see
    :func:`part_of`."""
    owned = {each.parameter: each for each in held.owned}
    local: dict[int, State] = {}
    groups, count = [], 0
    for mine, other in zip(fragments, saved, strict=True):
        numbers = list(range(count, count + len(mine["params"])))
        count += len(numbers)
        for number, fragment in zip(numbers, mine["params"], strict=True):
            each = owned[fragment]
            found = states.get(held.model[each.index])
            if found is not None:
                local[number] = part_of(each.fragment, found, elementwise)
        groups.append({**options(other), "params": numbers})
    return {"state": local, "param_groups": groups}


def by_parameter(
    state_dict: Mapping[str, Any], groups: Sequence[Group], where: str
) -> dict[Tensor, State]:
    """The state in a checkpoint, by the parameters of ``groups``, which it must be of.

    Raises CheckpointError where groups or numbers of parameters differ.
    """
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


# ---- what is owed ----


def consolidate_owed(
    exchange: Exchange, held: Held, lost: Sequence[Tensor], to: int
) -> dict[Tensor, Tensor]:
    """The mean over the ranks of what each has ``lost``, by bucket: whole tensors, by parameter, at
    rank ``to``; empty elsewhere. A mean of gradients lacks just that."""
    out: dict[Tensor, Tensor] = {}
    for shard, flat in zip(held.shards, lost, strict=True):
        mean = flat.to(torch.promote_types(flat.dtype, torch.float32))
        with exchange.owners_needed():
            exchange.combine(mean, dist.ReduceOp.SUM).wait()
        mean = mean.div_(exchange.world).cpu()
        for member in shard.bucket.members if exchange.rank == to else ():
            whole = torch.empty_strided(member.shape, member.stride, dtype=mean.dtype)
            whole.as_strided((member.end - member.begin,), (1,)).copy_(
                mean[member.begin : member.end]
            )
            out[held.model[member.index]] = whole
    return out


def owed(
    state_dict: Mapping[str, Any], groups: Sequence[Group], held: Held, where: str
) -> dict[int, Tensor]:
    """What each rank owes after loading a checkpoint that :func:`by_parameter` has passed, by the
    parameter's index: the mean, so that the mean over these ranks gets just what that over those
    lacked. Raises CheckpointError for what isn't a parameter's."""
    given = dict(state_dict.get(OWED, {}))
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    places = {parameter: index for index, parameter in enumerate(held.model)}
    out: dict[int, Tensor] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        value = given.pop(number, None)
        if value is None or parameter not in places:
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{where}: the checkpoint's {OWED} of {held.name(places[parameter])} has shape "
                f"{shape}, wanted {tuple(parameter.shape)}; it is another model's"
            )
        if bool(value.any()):
            out[places[parameter]] = value
    if given:
        raise CheckpointError(
            f"{where}: the checkpoint has {OWED} of parameters {sorted(given)[:8]}, which are in "
            f"none of its groups; it is damaged, and nothing was loaded"
        )
    return out


# ---- numbers ----


def pack_groups(fragments: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """``groups`` (the model's) as a plain optimizer's ``state_dict`` has them, with the options in
    force: those of ``fragments``, the inner optimizer's groups."""
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
    """State by the numbers of :func:`pack_groups`, in their order."""
    numbers = _numbers(groups)
    by_number = {numbers[parameter]: state for parameter, state in states.items()}
    return dict(sorted(by_number.items()))


def _numbers(groups: Sequence[Group]) -> dict[Tensor, int]:
    """By parameter, as torch numbers them; one that comes twice has its first number."""
    out: dict[Tensor, int] = {}
    start = 0
    for group in groups:
        for place, parameter in enumerate(group["params"], start):
            out.setdefault(parameter, place)
        start += len(group["params"])
    return out

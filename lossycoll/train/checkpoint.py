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

from ..errors import CheckpointError
from .buckets import Fragment, Member
from .exchange import Exchange
from .held import Group, Held, options

State = dict[str, Any]
OWED: Final = "error_feedback"
"""The key of what is owed, by the parameter's number: the mean over the ranks, without scale."""


@dataclass(frozen=True)
class FragmentState:
    """What a rank tells of its fragment of a parameter: elements ``begin`` to ``end`` of that, in
    the order of memory. ``sliced``: state that has an entry for each of these."""

    index: int
    begin: int
    end: int
    sliced: State
    whole: State


def state_of(
    fragment: Fragment, state: Mapping[str, Any], elementwise: Collection[str]
) -> FragmentState:
    """``state``: of ``fragment``. ``elementwise``: see :func:`cut`."""
    length = fragment.end - fragment.begin
    sliced: State = {}
    whole: State = {}
    for key, value in state.items():
        held = value.detach().cpu() if isinstance(value, Tensor) else value
        each = isinstance(value, Tensor) and value.shape == (length,)
        # With a single element the shape can't tell, and the name must.
        target = sliced if each and (length > 1 or key in elementwise) else whole
        target[key] = held
    return FragmentState(
        fragment.member.index, fragment.offset, fragment.offset + length, sliced, whole
    )


def joined(member: Member, states: Sequence[FragmentState]) -> State:
    """The state of a whole parameter from those of all of its fragments."""
    length = member.end - member.begin
    out: State = {}
    for told in states:
        for key, value in told.whole.items():
            out.setdefault(key, value)
        for key, value in told.sliced.items():
            if key not in out:
                out[key] = torch.empty_strided(member.shape, member.stride, dtype=value.dtype)
            out[key].as_strided((length,), (1,))[told.begin : told.end] = value
    assert sum(told.end - told.begin for told in states) == length, (member, states)
    return out


def cut(fragment: Fragment, state: Mapping[str, Any], elementwise: Collection[str]) -> State:
    """What the fragment has of a whole parameter's state, which :func:`check_state` has passed.

    ``elementwise``: names of what has an entry for each element.
    """
    member, out = fragment.member, {}
    for key, value in state.items():
        if not _has_elements(key, value, elementwise):
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
        if _has_elements(key, value, elementwise) and tuple(value.shape) != shape:
            raise CheckpointError(
                f"the checkpoint's {key} of {name} has shape {tuple(value.shape)}, wanted "
                f"{shape}; it is another model's, or its parameters are in another order"
            )


def _has_elements(key: str, value: object, elementwise: Collection[str]) -> bool:
    """Of a parameter without dimensions only the name can tell."""
    return isinstance(value, Tensor) and (value.dim() > 0 or key in elementwise)


# ---- whole checkpoints ----


def gather(
    exchange: Exchange, held: Held, state: Mapping[Any, State], to: int
) -> dict[Tensor, State] | None:
    """The state of all parameters, by parameter, at rank ``to``; None elsewhere.

    ``state``: the inner optimizer's, by fragment. Bucket by bucket, so that what travels at once is
    bounded.
    """
    out: dict[Tensor, State] = {}
    for shard in held.shards:
        mine = [
            state_of(each.fragment, found, held.elementwise)
            for each in shard.owned
            if (found := state.get(each.parameter))
        ]
        told = exchange.tell(mine, to) or []
        for member in shard.bucket.members:
            states = [each for row in told for each in row if each.index == member.index]
            if states:
                out[held.model[member.index]] = joined(member, states)
    out |= {parameter: found for parameter, found in held.frozen.items() if found}
    return out if exchange.rank == to else None


def deal(
    states: Mapping[Tensor, State],
    saved: Sequence[Mapping[str, Any]],
    fragments: Sequence[Mapping[str, Any]],
    held: Held,
) -> dict[str, Any]:
    """What this rank's inner optimizer loads of a checkpoint: ``states`` by parameter, and its
    groups ``saved``. ``fragments``: the inner optimizer's groups."""
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
                local[number] = cut(each.fragment, found, held.elementwise)
        groups.append({**options(other), "params": numbers})
    return {"state": local, "param_groups": groups}


def by_parameter(
    state_dict: Mapping[str, Any], groups: Sequence[Group], where: str
) -> dict[Tensor, State]:
    """The state in a checkpoint, by the parameters of ``groups``, which it must be of.

    Raises CheckpointError where groups or numbers of parameters differ.
    """
    if not {"state", "param_groups"} <= set(state_dict):
        raise CheckpointError(
            f"{where}: the checkpoint has {sorted(state_dict)}, wanted state and param_groups, as "
            f"an optimizer's state_dict() has them"
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


def gather_owed(
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

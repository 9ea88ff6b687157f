"""Parameters of a model at one rank: as the user groups them, in buckets, and as own fragments.

All parameters of a bucket are views of one tensor, so what an all-gather writes there is in the
model. This rank's chunk is cut into fragments, each a parameter of the optimizer, with a gradient
that is a view as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lossycoll.errors import PeerLostError, TrainingError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.consistency import Agreement, as_lines, check_same
from lossycoll.train.common.layout import Bucket, Fragment, lay_out

from .eligibility import NamedParameter, Trial, check_parameters
from .settings import ShardedSettings

REMEDY: Final = (
    "A rank that is lost had the only copy of its share of the optimizer's state: restart with the "
    "ranks that are left from the last checkpoint, which loads at any number of ranks"
)


@contextlib.contextmanager
def owners_needed() -> Iterator[None]:
    """A scope in which PeerLostError also says what the loss means here."""
    try:
        yield
    except PeerLostError as error:
        if REMEDY in str(error):
            raise
        raise PeerLostError(f"{error}. {REMEDY}", peer=error.peer) from error


@dataclass(eq=False)
class OwnedFragment:
    """A fragment that this rank owns, as its optimizer has it."""

    fragment: Fragment
    parameter: Parameter  # a view of the bucket, float (n,); of a whole parameter, in its shape
    grad: Tensor  # its averaged gradient, of the same shape

    @property
    def index(self) -> int:
        return self.fragment.member.index


@dataclass(eq=False)
class Place:
    """A parameter's place in a bucket in memory."""

    index: int  # the parameter's
    parameter: Parameter
    data: Tensor  # the bucket's elements, of which the parameter becomes a view
    grad: Tensor  # this rank's contribution
    residual: Tensor | None = None  # with error feedback, what of it is still to be sent

    def is_held(self) -> bool:
        """True if the parameter still is the bucket's view, in memory and type."""
        parameter, data = self.parameter, self.data
        return not data.numel() or (
            parameter.data_ptr() == data.data_ptr() and parameter.dtype == data.dtype
        )


class Shard:
    """A bucket in memory. Its parameters become views of it."""

    def __init__(self, bucket: Bucket, model: Sequence[Parameter], rank: int) -> None:
        first = model[bucket.members[0].index]
        self.bucket = bucket
        self.flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        """All parameters, float (size,)."""
        self.grads = torch.zeros_like(self.flat)
        """Contribution of this rank, float (size,). Padding stays 0."""
        self.chunk = bucket.chunk(rank)
        """The elements that this rank owns."""
        self.own_grads = torch.zeros(bucket.counts[rank], dtype=first.dtype, device=first.device)
        """This rank's chunk of the mean, float (chunk,)."""
        self.places = [
            Place(m.index, model[m.index], m.view(self.flat), m.view(self.grads))
            for m in bucket.members
        ]
        with torch.no_grad():
            for place in self.places:
                place.data.copy_(place.parameter)
                place.parameter.data = place.data
        self.owned = [
            OwnedFragment(
                fragment,
                Parameter(_view(fragment, self.flat, fragment.begin)),
                _view(fragment, self.own_grads, fragment.begin - self.chunk.start),
            )
            for fragment in bucket.fragments(rank)
        ]


def _view(fragment: Fragment, flat: Tensor, begin: int) -> Tensor:
    """A fragment's elements, which begin at ``begin`` in ``flat``."""
    if fragment.whole:
        return flat.as_strided(fragment.member.shape, fragment.member.stride, begin)
    return flat[begin : begin + fragment.end - fragment.begin]


class ModelGroups(Optimizer):
    """The model's parameter groups as the user gave them, checked by torch; it takes no steps."""

    def __init__(self, params: Any) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params is a model ({type(params).__name__}), wanted its parameters(): "
                "ShardedOptimizer(model.parameters(), ...)"
            )
        super().__init__(params, {})

    @contextlib.contextmanager
    def adding(
        self, param_group: dict[str, Any], frozen: Collection[Parameter]
    ) -> Iterator[set[Parameter]]:
        """Adds a group; if the block raises, the groups are what they were before.

        Those of ``frozen`` that require gradients now leave the groups that they are in. Yields the
        parameters that were frozen.
        """
        added = dict(param_group)
        members = added["params"]
        added["params"] = [members] if isinstance(members, Tensor) else list(members)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in added["params"]]
        thawed = {tensor for tensor in tensors if tensor in frozen and tensor.requires_grad}
        before, self.param_groups = self.param_groups, []
        for group in before:
            kept = [p not in thawed for p in group["params"]]
            members = {key: list(compress(of, kept)) for key, of in _members(group).items()}
            self.param_groups.append({**group, **members})
        try:
            self.add_param_group(added)
            yield thawed
        except BaseException:
            self.param_groups = before
            raise

    def packed(
        self, states: Mapping[Tensor, Any], options_of: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """A plain optimizer's ``state_dict()`` of states by parameter, and options by group."""
        pairs = zip(options_of, self.param_groups, strict=True)
        self.param_groups = [{**given, **_members(group)} for given, group in pairs]
        self.state = dict(states)  # type: ignore[assignment]
        found = self.state_dict()
        self.state.clear()
        return {**found, "state": dict(sorted(found["state"].items()))}


Group = dict[str, Any]
MEMBERS: Final = ("params", "param_names")  # lists of a group, with an entry for each parameter


def _members(group: Group) -> dict[str, list[Any]]:
    return {key: list(group[key]) for key in MEMBERS if key in group}


@dataclass(eq=False)
class ParameterStore:
    """All parameters of one optimizer, in buckets, and this rank's fragments of them."""

    collectives: Collectives
    groups: ModelGroups
    settings: ShardedSettings
    optimizer_class: Callable[..., Any]
    defaults: Mapping[str, Any]
    model: list[Parameter] = field(default_factory=list)
    """The parameters that are trained, in order of registration: elsewhere called by index."""
    names: list[str] = field(default_factory=list)
    frozen: dict[Parameter, dict[str, Any]] = field(default_factory=dict)
    """Frozen parameters, with their state from a checkpoint."""
    shards: list[Shard] = field(default_factory=list)
    owned: list[OwnedFragment] = field(default_factory=list)
    elementwise: frozenset[str] = frozenset()
    """Names of the optimizer's state that has an entry for each element."""

    def take(self, number: int) -> list[Group]:
        """Moves parameters of new groups, from group ``number`` on, into buckets.

        All ranks call this. Returns groups of this rank's fragments. After an error (one can't be
        sharded, or ranks differ) nothing has been moved.
        """
        groups = self.groups.param_groups[number:]
        named = [
            each for place, group in enumerate(groups, number) for each in _named(group, place)
        ]
        trained = [each for each in named if each.parameter.requires_grad]
        frozen = [each.parameter for each in named if not each.parameter.requires_grad]
        still = [parameter for parameter in (*self.frozen, *frozen) if not parameter.requires_grad]
        check_parameters(self.collectives, trained, still)
        elementwise = self.elementwise
        for group in groups:
            trial = Trial(
                self.optimizer_class, self.defaults, str(self.collectives), options(group)
            )
            elementwise |= trial.whole_state() if self.settings.whole else trial.elementwise_state()
        start, every = len(self.model), self.collectives.world
        buckets = lay_out(
            [each.spec for each in trained],
            every,
            self.settings.bucket_bytes,
            start=start,
            whole=self.settings.whole,
            # What is reported lost goes by equal chunks.
            owners=None if self.settings.error_feedback else self.collectives.owners,
        )
        settings = self._settings_with(groups, number)
        settings["owners"] = [every - bucket.counts.count(0) for bucket in buckets]
        lines = [*as_lines(settings), *map(str, trained)]
        device = trained[-1].parameter.device if trained else torch.device("cpu")
        check_same(
            [Agreement(self.collectives, lines, device)],
            "ShardedOptimizer is made differently",
            "all ranks need the same model and the same arguments",
        )
        self.elementwise = elementwise
        self.model += [each.parameter for each in trained]
        self.names += [each.name for each in trained]
        self.frozen |= {parameter: {} for parameter in frozen}
        shards = [Shard(bucket, self.model, self.collectives.rank) for bucket in buckets]
        for shard in shards:
            self.collectives.broadcast(shard.flat)
        owned = [each for shard in shards for each in shard.owned]
        self.shards += shards
        self.owned += owned
        out = [{**options(group), "params": []} for group in groups]
        for each in sorted(owned, key=lambda each: each.index):
            out[trained[each.index - start].group - number]["params"].append(each.parameter)
        return out

    def _settings_with(self, groups: Sequence[Group], number: int) -> dict[str, Any]:
        settings = self.settings.agreed(self.optimizer_class)
        for place, group in enumerate(groups, number):
            written = {**self.defaults, **options(group)}
            plain = {key: value for key, value in written.items() if _is_plain(value)}
            settings[f"group {place}"] = dict(sorted(plain.items()))
        return settings

    def moved(self) -> list[int]:
        """Indices of parameters that were given other memory, as by another optimizer."""
        places = [place for shard in self.shards for place in shard.places]
        return [place.index for place in places if not place.is_held()]

    def check_sound(self) -> None:
        for index in self.moved():
            raise TrainingError(
                f"{self.collectives}: {self.names[index]} was given other memory after the "
                f"optimizer was made (by model.to() or parameter.data = ..., say); do that before, "
                f"or make the optimizer anew"
            )
        for parameter in self.frozen:
            if parameter.grad is not None:
                raise TrainingError(
                    f"{self.collectives}: a parameter of shape {tuple(parameter.shape)} that was "
                    f"frozen (requires_grad=False) when the optimizer was made has a gradient; "
                    f"call optimizer.add_param_group({{'params': [parameter]}}) on all ranks when "
                    f"it is to be trained"
                )


def options(group: Mapping[str, Any]) -> Group:
    """The options of a parameter group: a copy without its members."""
    return {key: value for key, value in group.items() if key not in MEMBERS}


def _named(group: Group, place: int) -> list[NamedParameter]:
    """The parameters of group ``place``, each once."""
    names = group.get("param_names")
    out: dict[Parameter, NamedParameter] = {}
    for position, parameter in enumerate(group["params"]):
        name = f"parameter {position} of group {place}"
        name = f"{names[position]!r} ({name})" if names else name
        out.setdefault(parameter, NamedParameter(parameter, name, place))
    return list(out.values())


def _is_plain(value: object) -> bool:
    """True if two processes write it alike."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)

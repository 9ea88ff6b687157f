"""What one rank holds of a model: all of its parameters, in buckets, and its own fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Exchange
from lossycoll.train.common.consistency import check_same
from lossycoll.train.common.layout import lay_out

from .elementwise_probe import elementwise_state
from .eligibility import check_parameters, meant, spec
from .shard import Owned, Shard

Group = dict[str, Any]


class Held:
    """``settings``: what all ranks must have alike, by name; ``bucket_bytes`` is among them.

    ``optimizer_class`` and ``options``: the optimizer that steps the fragments.
    """

    def __init__(
        self,
        exchange: Exchange,
        optimizer_class: Callable[..., Any],
        options: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._exchange = exchange
        self._class = optimizer_class
        self._options = options
        self._settings = settings
        self.model: list[Parameter] = []
        """The parameters that are trained, in order of registration: elsewhere called by index."""
        self.names: list[str] = []
        self.frozen: dict[Parameter, dict[str, Any]] = {}
        """Those that aren't, with the state that a checkpoint had of them."""
        self.shards: list[Shard] = []
        self.owned: list[Owned] = []
        self.elementwise: frozenset[str] = frozenset()
        """Names of the optimizer's state that has an entry for each element."""

    def name(self, index: int) -> str:
        """A parameter as errors call it."""
        return self.names[index]

    def take(self, groups: Sequence[Group], number: int) -> list[list[Parameter]]:
        """Moves the parameters of new groups, the first of which is group ``number``, into buckets,
        with rank 0's values. Returns this rank's fragments, by group. All ranks must call this.

        Raises UnsupportedError and MismatchError; then nothing has been moved.
        """
        model, names, frozen, places = [], [], [], []
        for place, group in enumerate(groups, number):
            for name, parameter in _named(group, place):
                if parameter.requires_grad:
                    model.append(parameter)
                    names.append(name)
                    places.append(place)
                else:
                    frozen.append(parameter)
        still = [parameter for parameter in (*self.frozen, *frozen) if not parameter.requires_grad]
        check_parameters(self._exchange, model, names, still)
        elementwise = self.elementwise
        settings = dict(self._settings)
        for place, group in enumerate(groups, number):
            written, where = options(group), str(self._exchange)
            elementwise |= elementwise_state(self._class, self._options, where, written)
            plain = {k: v for k, v in {**self._options, **written}.items() if _is_plain(v)}
            settings[f"group {place}"] = dict(sorted(plain.items()))
        specs = [spec(*pair) for pair in zip(model, places, strict=True)]
        check_same(
            [meant(self._exchange, settings, specs, names)],
            "ShardedOptimizer is made differently",
            "all ranks need the same model and the same arguments",
        )
        start = len(self.model)
        self.elementwise = elementwise
        self.model += model
        self.names += names
        self.frozen |= {parameter: {} for parameter in frozen}
        buckets = lay_out(specs, self._exchange.world, self._settings["bucket_bytes"], start=start)
        shards = [Shard(bucket, self.model, self._exchange.rank) for bucket in buckets]
        for shard in shards:
            self._exchange.broadcast(shard.flat)
        owned = [each for shard in shards for each in shard.owned]
        self.shards += shards
        self.owned += owned
        out: list[list[Parameter]] = [[] for _ in groups]
        for each in sorted(owned, key=lambda each: each.index):
            out[places[each.index - start] - number].append(each.parameter)
        return out

    def check_sound(self) -> None:
        """Raises TrainingError if a parameter isn't where, or what, it was."""
        for shard in self.shards:
            for position, member in enumerate(shard.bucket.members):
                if not shard.holds(position, self.model[member.index]):
                    raise TrainingError(
                        f"{self._exchange}: {self.names[member.index]} was given other memory "
                        f"after the optimizer was made (by model.to() or parameter.data = ..., "
                        f"say); do that before, or make the optimizer anew"
                    )
        for parameter in self.frozen:
            if parameter.grad is not None:
                raise TrainingError(
                    f"{self._exchange}: a parameter of shape {tuple(parameter.shape)} that was "
                    f"frozen (requires_grad=False) when the optimizer was made has a gradient; "
                    f"call optimizer.add_param_group({{'params': [parameter]}}) on all ranks when "
                    f"it is to be trained"
                )


def options(group: Mapping[str, Any]) -> Group:
    """What a parameter group says besides its members."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _named(group: Group, place: int) -> list[tuple[str, Parameter]]:
    """The parameters of group ``place``, each once, as errors call them."""
    told = group.get("param_names")
    out: dict[Parameter, str] = {}
    for position, parameter in enumerate(group["params"]):
        name = f"parameter {position} of group {place}"
        out.setdefault(parameter, f"{told[position]!r} ({name})" if told else name)
    return [(name, parameter) for parameter, name in out.items()]


def _is_plain(value: object) -> bool:
    """Whether two processes write it alike."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)

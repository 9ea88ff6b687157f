"""The names by which gradients are known from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lossycoll.errors import TrainingError


class ParameterNames:
    """The parameters' own names, once :meth:`set` was called; before, numbers in the order in which
    parameters are met. That order is the same in every run of a model, if it is met in the first
    step."""

    def __init__(self) -> None:
        self._keys: dict[Tensor, str] = {}
        self._known = False

    def set(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the parameters' names, as a module's ``named_parameters()`` gives them."""
        self._keys = {parameter: name for name, parameter in named_parameters}
        self._known = True

    def keys(self, parameters: Iterable[Tensor]) -> list[str]:
        """The keys by which gradients are known.

        TrainingError: a parameter has no name, others do.
        """
        out = []
        for parameter in parameters:
            if parameter not in self._keys:
                if self._known:
                    raise TrainingError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient but isn't "
                        f"one of named_parameters; give those of the model that DDP wraps"
                    )
                self._keys[parameter] = str(len(self._keys))
            out.append(self._keys[parameter])
        return out

    def say(self, key: str) -> str:
        """A parameter as errors call it: its name in quotes, or its number."""
        return repr(key) if self._known else f"parameter {key}"

"""A training's state, as peers and checkpoints exchange it: what is trained, by plain names, and
optimizers of any version of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lossycoll.errors import OptionError

COMPILED: Final = "_orig_mod."
"""In names of what ``torch.compile`` has wrapped."""
OF_SCHEDULES: Final = ("lr", "initial_lr")
"""Settings of an optimizer that each peer's own scheduler has."""
MOST_NAMED: Final = 3


def _names(model: nn.Module) -> dict[str, str]:
    """Plain names of what travels, and the model's own. Frozen parameters don't travel."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, one in named if not one.requires_grad}
    return {name.replace(COMPILED, ""): name for name in model.state_dict() if name not in frozen}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Trained parameters and buffers by plain names, as views of the model's."""
    state = model.state_dict()
    return {plain: state[name] for plain, name in _names(model).items()}


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Takes what :func:`model_state` returned, compiled or not.

    OptionError: it has other names. RuntimeError: it has other shapes.
    """
    names = _names(model)
    if differ := sorted(names.keys() ^ state.keys()):
        raise OptionError(
            f"the state and the model differ in {len(differ)} names, "
            f"{', '.join(differ[:MOST_NAMED])} among them"
        )
    model.load_state_dict({names[plain]: value for plain, value in state.items()}, strict=False)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Takes an optimizer's state.

    Settings that only one of the two has stay as they are here, as other versions of torch have
    others; so do learning rates, which are schedulers'. OptionError: it is of other parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    theirs = state["param_groups"]
    sizes = [[len(group["params"]) for group in some] for some in (groups, theirs)]
    if sizes[0] != sizes[1]:
        raise OptionError(f"its groups have {sizes[1]} parameters, wanted {sizes[0]}")
    for own, other in zip(groups, theirs, strict=True):
        known = own.keys() & other.keys() - {"params", *OF_SCHEDULES}
        own.update({name: other[name] for name in known})
        # State is by the number of a parameter.
        own["params"] = list(other["params"])
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})

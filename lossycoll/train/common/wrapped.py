"""Unwrapping of models and optimizers that frameworks have wrapped."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lossycoll.errors import UnsupportedError

LAYERS: Final = ("_orig_mod", "_forward_module", "module")
"""Attributes with a wrapper's module: torch.compile's, Lightning Fabric's, and DDP's."""
PLAIN_NAMES: Final = LAYERS[:2]
"""Layers that never appear in the names of parameters."""
INNER: Final = ("optimizer", "optim")
"""Attributes with a wrapper's optimizer: most, and torchft's."""
MOST_LAYERS: Final = 16


def steps_of(optimizer: object, method: str) -> Optimizer:
    """The optimizer whose steps a wrapper makes.

    Accelerate's AcceleratedOptimizer is a torch optimizer by its class, and has none of its hooks,
    since it never runs that constructor; nor has Lightning's, which takes on the class of what it
    wraps. Both have what they wrap as ``optimizer``, and torchft's, which is like the first, as
    ``optim``. An optimizer that has hooks of its own counts as the one that steps, whatever it
    wraps. UnsupportedError, which names ``method``: there is
    none.
    """
    found = optimizer
    for _ in range(MOST_LAYERS):
        if isinstance(found, Optimizer) and "_optimizer_step_post_hooks" in vars(found):
            return found
        found = next((getattr(found, name) for name in INNER if hasattr(found, name)), None)
    name = type(optimizer).__name__
    raise UnsupportedError(
        f"optimizer is a {name}, wanted a torch.optim.Optimizer, or a wrapper that has one as "
        f"{name}.optimizer or {name}.optim; pass {method} the torch optimizer that makes the steps"
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model, and what it wraps, from outside to inside.

    A wrapper has no parameters but those of what it wraps. UnsupportedError: one of them keeps the
    parameters elsewhere.
    """
    layers = [model]
    while (inner := _inside(layers[-1])) is not None and len(layers) < MOST_LAYERS:
        layers.append(inner)
    return layers


def _inside(model: nn.Module) -> nn.Module | None:
    check_keeps_parameters(model)
    for name in LAYERS:
        inner = model._modules.get(name)  # not getattr: wrappers hand on what they haven't
        if inner is not None:
            own = {id(each) for each in model.parameters()}
            return inner if own <= {id(each) for each in inner.parameters()} else None
    return None


def check_keeps_parameters(module: nn.Module) -> None:
    """Refuses (UnsupportedError) wrappers whose parameters are views of their own memory."""
    name = type(module).__name__
    sharded = sys.modules.get("torch.distributed.fsdp")
    if sharded is not None and isinstance(module, sharded.FullyShardedDataParallel):
        raise UnsupportedError(
            f"the model has a {name} (FSDP1), whose flat parameters are views of memory that comes "
            f"and goes; wrap it with fully_shard (FSDP2)"
        )
    if type(module).__module__.partition(".")[0] == "deepspeed":
        raise UnsupportedError(
            f"the model is a {name}, which reduces gradients and steps copies of the parameters by "
            f"itself; use the backend lossy without this method under it, or use "
            f"DistributedDataParallel with a torch optimizer"
        )


def innermost(model: nn.Module) -> nn.Module:
    """The module that has the names of the parameters.

    ``module`` is a name that models of one's own have as well, so it counts as a wrapper's only
    around or within one that is known.
    """
    layers = layers_of(model)
    known = [inner for outer, inner in pairwise(layers) if _is_known(outer)]
    return known[-1] if known else model


def _is_known(wrapper: nn.Module) -> bool:
    return isinstance(wrapper, DistributedDataParallel) or any(
        wrapper._modules.get(name) is not None for name in PLAIN_NAMES
    )


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The outermost DistributedDataParallel that a model is, or wraps, if there is one."""
    found = (each for each in layers_of(model) if isinstance(each, DistributedDataParallel))
    return next(found, None)

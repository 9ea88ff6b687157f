"""Has each module of a model wait for its own parameters, which the last step has sent.

So they travel while the forward pass runs. A module that is never called, since another one reads
its parameters (torch's attention does so with its last layer), has them waited for by the module
around it: which modules are called, the first training pass shows. Autograd notices what is read
without all that: when the model is done, what nobody has waited for is waited for, and its version
rises. ``state_dict``, ``load_state_dict`` and a pass that isn't for training wait for everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lossycoll.errors import UnsupportedError
from lossycoll.train.common.models import ddp_of, layers_of, weakly

from .parameter_sync import ParameterSync


class _Hook:
    """A hook that torch.compile doesn't look into, and that isn't saved with the model."""

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._call(module)

    # What torch.compiler.disable sets, without the seconds that importing the compiler takes.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_do_nothing,)


def _do_nothing(module: nn.Module) -> None:
    """For a model that was loaded, and has no optimizer."""


class ModuleWaits:
    """The hooks of one model, which don't keep ``sync`` alive, and go with it.

    One that was compiled as a whole waits as a whole: hooks of its modules would cut its graph.
    """

    def __init__(self, model: nn.Module, sync: ParameterSync) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedError(
                f"model is a {type(model).__name__}, wanted the torch.nn.Module whose parameters "
                f"are passed, or None"
            )
        self._model = model
        self._sync = weakref.ref(sync)
        self._called: set[nn.Module] = set()
        self._waits: dict[nn.Module, list[Parameter]] | None = None
        """Parameters that each module waits for; None before the first training pass is over."""
        self._finish_all, close_all = weakly(sync.finish_all), weakly(sync.close)
        enter, finish = _Hook(self._enter), _Hook(lambda _: self._finish_all())
        close = _Hook(lambda _: close_all())
        if (ddp := ddp_of(model)) is not None:
            raise UnsupportedError(
                f"model is a {type(model).__name__} with DistributedDataParallel, which reduces "
                f"gradients that ShardedOptimizer reduces as well; pass the module inside "
                f"({type(ddp).__name__}.module), and call that one"
            )
        handles: list[RemovableHandle] = []
        compiled = any("_orig_mod" in layer._modules for layer in layers_of(model))
        for module in model.modules():
            if not compiled and next(module.parameters(), None) is not None:
                handles.append(module.register_forward_pre_hook(enter))
            handles += [
                module.register_state_dict_pre_hook(finish),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(close),  # type: ignore[no-untyped-call]
            ]
        if compiled:
            handles.append(model.register_forward_pre_hook(finish))
        handles.append(model.register_forward_hook(_Hook(self._leave)))
        for handle in handles:
            weakref.finalize(sync, handle.remove).atexit = False

    def check(self, parameters: Iterable[Parameter]) -> None:
        members = set(self._model.parameters())
        for parameter in parameters:
            if parameter not in members:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(parameter.shape)} isn't in the model "
                    f"({type(self._model).__name__}) that was passed as model=, which is to wait "
                    f"for it; pass the module that has all parameters, or leave model out"
                )

    def _enter(self, module: nn.Module) -> None:
        sync = self._sync()
        if sync is None:
            return
        if module.training:
            self._called.add(module)
        if self._waits is None or not module.training:
            sync.finish_all()
            return
        for parameter in self._waits.get(module, ()):
            number = sync.places.get(parameter)
            if number is not None:
                sync.finish(number)

    def _leave(self, model: nn.Module) -> None:
        self._finish_all()
        if self._waits is None and model.training:
            self._waits = {
                module: list(self._parameters_read_by(module)) for module in model.modules()
            }

    def _parameters_read_by(self, module: nn.Module) -> Iterator[Parameter]:
        """Its own, and those of modules in it that nobody calls."""
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in self._called:
                yield from self._parameters_read_by(child)

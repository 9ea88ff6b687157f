"""Accumulated gradients averaged by DistributedDataParallel, once a rank has stopped computing.

DDP reduces within a backward pass. So it is given one that computes nothing: its own reducer, with
its buckets and comm hooks, takes the gradients that are there, and zeros where there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lossycoll.errors import TrainingError, UnsupportedError
from lossycoll.train.drop_ranks import Ranks

from .gradients import NO_FLAGS, Start, device_of, multiply


class ByDdp:
    """Works with whatever DDP was told: find_unused_parameters, static_graph, views of buckets,
    comm hooks."""

    def __init__(self, model: DistributedDataParallel) -> None:
        for unfit, what in (
            (model._use_python_reducer, "torch._dynamo.config.optimize_ddp = 'python_reducer'"),
            (model.mixed_precision is not None, "mixed_precision (autocast does work)"),
            (model._delay_all_reduce_all_params, "delay_all_reduce_named_params of all parameters"),
        ):
            if unfit:
                raise UnsupportedError(
                    f"DistributedDataParallel with {what} doesn't reduce gradients within the "
                    f"backward pass, from which DropCompute has them reduced; leave that out"
                )
        self._model = cast("Any", model)
        parameters, sparse = self._model._build_params_for_reducer()
        known = self._model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters))
        if known != len(parameters):
            raise TrainingError(
                f"the model has {len(parameters)} parameters that require gradients, and had "
                f"{known} when DistributedDataParallel was made of it; make that anew, and then "
                f"DropCompute"
            )
        self.parameters: Sequence[Parameter] = parameters
        self._sparse = [p for p, is_sparse in zip(parameters, sparse, strict=True) if is_sparse]
        self.ranks = Ranks(model.process_group, device_of(parameters))
        self._order: _Order | None = None
        self._searches = model.find_unused_parameters and not model.static_graph
        if not self._searches and not model._has_rebuilt_buckets:
            self._order = _Order(parameters)
        self._untouched = model.static_graph and not model._static_graph_delay_allreduce_enqueued

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        if self._model._join_config.enable:
            raise UnsupportedError(
                "DropCompute can't be used within DistributedDataParallel.join(), nor after it, as "
                "torch leaves it on: join counts forward passes, of which ranks do different "
                "numbers here; leave join out, as ranks that run out of data take part in each "
                "step anyway (drop.steps)"
            )
        if self._untouched:
            self._untouched = False
            self._first_pass()
        quiet: contextlib.AbstractContextManager[None] = self._model.no_sync()
        return quiet

    def reduce(self, start: Start) -> None:
        self._empty_pass(start)
        if self._order is not None and self._model._has_rebuilt_buckets:
            self._order.forget()
            self._order = None

    @property
    def flags(self) -> Tensor:
        """Of a static graph, which parameters have a gradient here."""
        if not self._model.static_graph:
            return NO_FLAGS
        return torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float64)

    def finish(self, flags: Tensor, factor: float) -> None:
        if self._model.static_graph:
            for parameter, count in zip(self.parameters, flags.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        if factor != 1.0:
            multiply(self.parameters, factor)

    def _first_pass(self) -> None:
        """The first pass of a static graph must not be one of no_sync, and is the one in which DDP
        learns what is used: everything, it is told, as nobody knows yet."""
        bare = [parameter for parameter in self.parameters if parameter.grad is None]
        for parameter in bare:
            parameter.grad = torch.zeros_like(parameter)
        self._empty_pass(lambda: None)
        for parameter in bare:
            parameter.grad = None

    def _empty_pass(self, start: Start) -> None:
        """A forward pass of nothing through DDP, and its backward pass, in which parameters get
        gradients that aren't there: accumulating those changes nothing, but DDP hears of it."""
        for parameter in self._sparse:
            if parameter.grad is None:  # DDP has no zeros for these
                parameter.grad = torch.zeros_like(parameter).to_sparse(1)
        touched = self._touched()
        with torch.enable_grad():
            token: Any = torch.zeros((), device=touched[0].device, requires_grad=True)
            self._model._pre_forward(token)
            start()
            if self._order is None:
                token = _Touch.apply(token, *touched)  # type: ignore[no-untyped-call]
            else:
                # The last that is touched is the first to be ready.
                for parameter in reversed(touched):
                    token = _Touch.apply(token, parameter)  # type: ignore[no-untyped-call]
            self._model._post_forward(token).backward()

    def _touched(self) -> Sequence[Parameter]:
        """In the order in which they are to be ready, while that matters."""
        if self._searches:
            # DDP finds the others by itself. Of nothing it would find nothing.
            trained = [p for p in self.parameters if p.requires_grad]
            return [p for p in reversed(trained) if p.grad is not None] or trained[:1]
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                raise TrainingError(
                    f"parameter {index} of shape {tuple(parameter.shape)} was frozen "
                    f"(requires_grad=False) after DistributedDataParallel was made, which waits "
                    f"for its gradient; make it anew, and then DropCompute, or pass "
                    f"find_unused_parameters=True"
                )
        return self.parameters[::-1] if self._order is None else self._order.parameters()


class _Touch(torch.autograd.Function):
    """Passes ``token`` on. In the backward pass ``parameters`` get no gradients, but are told so.

    Those that have hooks of their user get zeros, since hooks expect a tensor.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return grads[0], *(
            p.new_zeros(()).expand(p.shape) if p._backward_hooks else None for p in ctx.parameters
        )


class _Order:
    """In which parameters got their gradients. DDP lays its buckets out anew by the order of its
    first reduced pass; as that is an empty one here, it repeats that of the last true one."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._seen: dict[int, None] = {}
        # Hooks of graph nodes: those of parameters would be seen by torch.compile.
        used: list[Any] = [p.expand_as(p).grad_fn for p in parameters]
        nodes = [function.next_functions[0][0] for function in used]
        self._nodes = nodes  # or they would be gone, with their hooks
        self._hooks = [
            node.register_hook(lambda *_, index=index: self._note(index))
            for index, node in enumerate(nodes)
        ]

    def _note(self, index: int) -> None:
        self._seen.pop(index, None)
        self._seen[index] = None

    def parameters(self) -> list[Parameter]:
        seen = list(self._seen)
        rest = [i for i in reversed(range(len(self._parameters))) if i not in self._seen]
        return [self._parameters[index] for index in seen + rest]

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

"""Accumulated gradients averaged by DistributedDataParallel, once a rank has stopped computing.

DDP reduces within a backward pass. So it is given an empty one, which computes nothing: DDP's own
reducer, with its buckets and comm hooks, takes the gradients that are there, and zeros where there
are none (docs/dropcompute.md, "What the gradients are").
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
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.works import Work

from .gradients import NO_FLAGS, Submit, grad_flags_of, scale_gradients


class DdpAveraging:
    """Has DDP reduce.

    Its find_unused_parameters, static_graph, views of buckets and comm hooks are served.
    UnsupportedError: an option with which DDP reduces elsewhere than in the backward pass.
    TrainingError: parameters were frozen or unfrozen since DDP was constructed.
    """

    optimizer = None

    def __init__(self, model: DistributedDataParallel) -> None:
        _check_reduces_in_backward(model)
        self._model = cast("Any", model)
        parameters, sparse = self._model._build_params_for_reducer()
        known = self._model._get_ddp_logging_data().get("num_parameter_tensors", len(parameters))
        if known != len(parameters):
            raise TrainingError(
                f"the model has {len(parameters)} parameters that require gradients, and had "
                f"{known} when DistributedDataParallel was constructed; construct that again, and "
                f"then DropCompute"
            )
        self.parameters: Sequence[Parameter] = parameters
        self._sparse = [p for p, is_sparse in zip(parameters, sparse, strict=True) if is_sparse]
        self.collectives = Collectives(model.process_group)
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        self._order: _GradientOrder | None = None
        """Watched until DDP has laid its buckets out by it."""
        if not self._finds_unused and not model._has_rebuilt_buckets:
            self._order = _GradientOrder(parameters)
        self._needs_first_pass = (
            model.static_graph and not model._static_graph_delay_allreduce_enqueued
        )

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As :meth:`~.averaging.GradientAveraging.no_sync`.

        UnsupportedError within DDP's ``join``.
        """
        if self._model._join_config.enable:
            raise UnsupportedError(
                "DropCompute can't be used within DistributedDataParallel.join(), nor after it, as "
                "torch leaves it on: join counts forward passes, of which ranks do different "
                "numbers here; leave join out, as ranks that run out of data take part in each "
                "step anyway (drop.steps)"
            )
        if self._needs_first_pass:
            self._needs_first_pass = False
            self._first_pass()
        scope: contextlib.AbstractContextManager[None] = self._model.no_sync()
        return scope

    def average(self, submit: Submit) -> Work | None:
        """As :meth:`~.averaging.GradientAveraging.average`."""
        submitted = self._empty_pass(submit)
        if self._order is not None and self._model._has_rebuilt_buckets:
            self._order.remove()
            self._order = None
        return submitted

    @property
    def grad_flags(self) -> Tensor:
        """As :attr:`~.averaging.GradientAveraging.grad_flags`."""
        # Only in a static graph does DDP leave zeros where no rank had a gradient.
        return grad_flags_of(self.parameters) if self._model.static_graph else NO_FLAGS

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """As :meth:`~.averaging.GradientAveraging.finish`."""
        if self._model.static_graph:
            for parameter, count in zip(self.parameters, grad_counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        scale_gradients(self.parameters, factor)

    def _first_pass(self) -> None:
        """The first pass over a static graph must not be within no_sync: in it DDP learns which
        parameters are used. Nobody knows yet, so all of them are."""
        bare = [parameter for parameter in self.parameters if parameter.grad is None]
        for parameter in bare:
            parameter.grad = torch.zeros_like(parameter)
        self._empty_pass(lambda: None)
        for parameter in bare:
            parameter.grad = None

    def _empty_pass(self, submit: Submit) -> Work | None:
        """A forward pass of nothing through DDP, and its backward pass. In that, parameters get
        gradients of None: accumulating these changes nothing, but DDP's reducer hears of each."""
        for parameter in self._sparse:
            if parameter.grad is None:  # DDP has no zeros for these
                parameter.grad = torch.zeros_like(parameter).to_sparse(1)
        parameters = self._ready_order()
        with torch.enable_grad():
            token: Any = torch.zeros((), device=parameters[0].device, requires_grad=True)
            self._model._pre_forward(token)
            submitted = submit()
            if self._order is None:
                token = _ReadySignal.apply(token, *parameters)  # type: ignore[no-untyped-call]
            else:
                # The last that is applied is the first to be ready.
                for parameter in reversed(parameters):
                    token = _ReadySignal.apply(token, parameter)  # type: ignore[no-untyped-call]
            self._model._post_forward(token).backward()
        return submitted

    def _ready_order(self) -> Sequence[Parameter]:
        """The parameters that take part in an empty pass, in the order in which they are to be
        ready, where that matters."""
        if self._finds_unused:
            # DDP finds the others by itself. Of nothing it would find nothing.
            trained = [p for p in self.parameters if p.requires_grad]
            return [p for p in reversed(trained) if p.grad is not None] or trained[:1]
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                raise TrainingError(
                    f"parameter {index} of shape {tuple(parameter.shape)} was frozen "
                    f"(requires_grad=False) after DistributedDataParallel was constructed, "
                    f"which waits for its gradient; construct that again, and then DropCompute, or "
                    f"pass find_unused_parameters=True"
                )
        return self.parameters[::-1] if self._order is None else self._order.parameters()


def _check_reduces_in_backward(model: DistributedDataParallel) -> None:
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


class _ReadySignal(torch.autograd.Function):
    """Passes ``token`` on. In the backward pass each of ``parameters`` gets a gradient of None, so
    its accumulation hooks run.

    Parameters with tensor hooks of their user get zeros, because such hooks expect a tensor.
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


class _GradientOrder:
    """The order in which parameters last got their gradients.

    DDP lays its buckets out again by the order of its first reduced pass. Here that is an empty
    one, so it repeats the order of the last true one.
    """

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
        """In that order; those without a gradient come last, in reverse."""
        seen = list(self._seen)
        rest = [i for i in reversed(range(len(self._parameters))) if i not in self._seen]
        return [self._parameters[index] for index in seen + rest]

    def remove(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()

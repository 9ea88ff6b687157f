"""Averaging of accumulated gradients over the ranks: the interface, and which way a model takes.

DistributedDataParallel and ShardedOptimizer average by their own reducers, and the gradients of a
plain module are averaged here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lossycoll.errors import OptionError, TrainingError, UnsupportedError
from lossycoll.train.common.collectives import Collectives, Complete, Work, wait_all
from lossycoll.train.common.layout import lay_out
from lossycoll.train.common.models import (
    check_keeps_parameters,
    ddp_of,
    innermost,
    is_dtensor,
    steps_of,
)
from lossycoll.train.sharded.eligibility import spec
from lossycoll.train.sharded.optimizer import ShardedOptimizer

Submit: TypeAlias = Callable[[], Work]
"""Submits a collective that travels beside the gradients."""


@torch.no_grad()
def scale_gradients(parameters: Iterable[Parameter], factor: float) -> None:
    if factor == 1.0:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    for sparse in (grad for grad in grads if grad.layout is not torch.strided):
        sparse.mul_(factor)
    if dense := [grad for grad in grads if grad.layout is torch.strided]:
        torch._foreach_mul_(dense, factor)


class GradientAveraging:
    """Averages the gradients of one model once this rank has stopped computing."""

    collectives: Collectives  # collectives of the ranks that average
    optimizer: ShardedOptimizer | None = None
    """The optimizer that averages the gradients itself, if one does."""
    counts_gradients = False
    """Whether the ranks add up how many have a gradient of each parameter."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    @property
    def grad_flags(self) -> Tensor:
        """1 for each parameter that has a gradient at this rank, float64 (n,); empty if uncounted.
        :meth:`finish` takes the sums over the ranks.
        """
        found = [p.grad is not None for p in self.parameters] if self.counts_gradients else []
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def average(self, submit: Submit) -> Work:
        """Replaces the gradients by the mean over the ranks; returns what ``submit`` returned."""
        raise NotImplementedError

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        """Multiplies gradients by ``factor``: from a mean over ranks to one over micro-batches."""
        del grad_counts
        scale_gradients(self.parameters, factor)


class ShardedAveraging(GradientAveraging):
    """Has the optimizer reduce, and scales the gradients of this rank's fragments."""

    optimizer: ShardedOptimizer

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.collectives = Collectives(optimizer.group)

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self.optimizer.sharded_parameters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def average(self, submit: Submit) -> Work:
        submitted = submit()
        self.optimizer.reduce_gradients()
        return submitted

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)


class ModuleAveraging(GradientAveraging):
    """Averages the gradients of a plain module, in buckets."""

    counts_gradients = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model = model
        self._laid_out: list[Parameter] = []  # the parameters that the buckets were made for
        self._flats: list[Tensor] = []  # the buckets, flat
        self._views: list[Tensor] = []  # the place of each parameter's gradient in them
        self.collectives = Collectives(group, optional=True)

    @property
    def parameters(self) -> Sequence[Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    @torch.no_grad()
    def average(self, submit: Submit) -> Work:
        submitted = submit()
        if self.collectives.world == 1:
            return submitted
        self._lay_out()
        for parameter, view in zip(self._laid_out, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / self.collectives.world, out=view)
        wait_all([self.collectives.all_reduce_gradients(flat) for flat in self._flats])
        return submitted

    @torch.no_grad()
    def finish(self, grad_counts: Tensor, factor: float) -> None:
        if self.collectives.world > 1:
            counts = grad_counts.tolist()
            for parameter, view, count in zip(self._laid_out, self._views, counts, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif count:
                    parameter.grad = view.clone()
        scale_gradients(self.parameters, factor)

    def _lay_out(self) -> None:
        """Makes the buckets, and makes them again if parameters were frozen, unfrozen or added."""
        parameters = self.parameters
        if list(map(id, parameters)) == list(map(id, self._laid_out)):
            return
        self._laid_out = list(parameters)
        self._flats = []
        views: dict[int, Tensor] = {}
        for bucket in lay_out([spec(parameter, 0) for parameter in parameters], 1):
            first = parameters[bucket.members[0].index]
            flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
            self._flats.append(flat)
            for member in bucket.members:
                views[member.index] = member.view(flat)
        self._views = [views[index] for index in range(len(parameters))]


class DdpAveraging(GradientAveraging):
    """Has DDP reduce, within an empty backward pass.

    DDP reduces within a backward pass. So it is given one that computes nothing: its own reducer,
    with its buckets and comm hooks, takes the gradients that are there, and zeros where there are
    none (docs/dropcompute.md, "What the gradients are").
    """

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
        self._parameters: Sequence[Parameter] = parameters
        self._sparse = [p for p, is_sparse in zip(parameters, sparse, strict=True) if is_sparse]
        self.collectives = Collectives(model.process_group)
        # Only in a static graph does DDP leave zeros where no rank had a gradient.
        self.counts_gradients = model.static_graph
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        self._order: _GradientOrder | None = None
        """Watched until DDP has laid its buckets out by it."""
        if not self._finds_unused and not model._has_rebuilt_buckets:
            self._order = _GradientOrder(parameters)
        self._needs_first_pass = (
            model.static_graph and not model._static_graph_delay_allreduce_enqueued
        )

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self._parameters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
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

    def average(self, submit: Submit) -> Work:
        submitted = self._empty_pass(submit)
        if self._order is not None and self._model._has_rebuilt_buckets:
            self._order.remove()
            self._order = None
        return submitted

    def finish(self, grad_counts: Tensor, factor: float) -> None:
        if self.counts_gradients:
            for parameter, count in zip(self.parameters, grad_counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        super().finish(grad_counts, factor)

    def _first_pass(self) -> None:
        """The first pass over a static graph must not be within no_sync: in it DDP learns which
        parameters are used. Nobody knows yet, so all of them are."""
        bare = [parameter for parameter in self.parameters if parameter.grad is None]
        for parameter in bare:
            parameter.grad = torch.zeros_like(parameter)
        self._empty_pass(Complete)
        for parameter in bare:
            parameter.grad = None

    def _empty_pass(self, submit: Submit) -> Work:
        """A forward pass of nothing through DDP, and its backward pass. In that, parameters get
        gradients of None: accumulating these changes nothing, but DDP's reducer hears of each."""
        for parameter in self._sparse:
            if parameter.grad is None:  # DDP has no zeros for these
                parameter.grad = torch.zeros_like(parameter).to_sparse(1)
        parameters = self._ready_order()
        with torch.enable_grad():
            token: Any = torch.zeros((), device=parameters[0].device, requires_grad=True)
            self._model._pre_forward(token)  # broadcasts buffers, as the first micro-batch does
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

    DDP lays its buckets out again by that of its first reduced pass, which is an empty one here.
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
        seen = list(self._seen)
        rest = [i for i in reversed(range(len(self._parameters))) if i not in self._seen]
        return [self._parameters[index] for index in seen + rest]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def averaging_of(model: object, group: dist.ProcessGroup | None) -> GradientAveraging:
    """The way of averaging for DDP (compiled or not), a ShardedOptimizer, or a module."""
    if isinstance(model, Optimizer):
        model = steps_of(model, "DropCompute")
    if isinstance(model, ShardedOptimizer):
        _check_no_group(group, "a ShardedOptimizer")
        return ShardedAveraging(model)
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"DropCompute was given a {type(model).__name__}; wanted: a module, plain or wrapped "
            f"by DistributedDataParallel, or a lossycoll.ShardedOptimizer"
        )
    ddp = ddp_of(model)
    if ddp is not None:
        _check_module(ddp)
        _check_no_group(group, "DistributedDataParallel")
        return DdpAveraging(ddp)
    model = innermost(model)
    _check_module(model)
    return ModuleAveraging(model, group)


def _check_no_group(group: dist.ProcessGroup | None, owner: str) -> None:
    if group is not None:
        raise OptionError(f"group was passed, but {owner} knows its own; leave it out")


def _check_module(model: nn.Module) -> None:
    """Ranks do different numbers of forward passes, so none of these may talk to each other."""
    for name, module in model.named_modules():
        check_keeps_parameters(module)
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"{name} is a SyncBatchNorm, whose forward pass waits for all ranks, but under "
                f"DropCompute ranks do different numbers of them; use BatchNorm, or GroupNorm"
            )
        if isinstance(module, DistributedDataParallel) and module is not model:
            raise UnsupportedError(
                f"{name} is a DistributedDataParallel within the module; pass that one, as what is "
                f"reduced by another can't be looked after from here"
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"parameter {name} is a DTensor (fully_shard, tensor parallelism): passes over it "
                f"wait for other ranks, but under DropCompute ranks do different numbers of them; "
                f"use DistributedDataParallel or lossycoll.ShardedOptimizer"
            )

"""An optimizer whose state is sharded, and whose gradients and parameters may lose packets."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lossycoll.errors import (
    CheckpointError,
    NonFiniteError,
    OptionError,
    TrainingError,
)
from lossycoll.train.common.arguments import is_whole
from lossycoll.train.common.collectives import Exchange
from lossycoll.train.common.layout import BUCKET_BYTES
from lossycoll.train.common.staleness import AUTO, MOST_REPAIR, REPAIR
from lossycoll.train.compress.arc_topk import ARCTopKState

from . import checkpoint
from .compression import Compressor
from .gradient_reducer import Reducer, Status
from .parameter_store import Held, options
from .parameter_sync import Copies, ShardedFigures
from .scaler_probe import Carrier

log: Final = logging.getLogger("lossycoll")


class ShardedOptimizer(Optimizer):
    """Any element-wise optimizer, sharded over the ranks of a network that loses packets.

    Called as torch's ZeroRedundancyOptimizer is, but the model is *not* wrapped in
    DistributedDataParallel: this reduces the gradients itself::

        optimizer = lossycoll.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()  # gradients travel meanwhile
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()  # each rank its own shard, then parameters travel

    It is the method of "Distributed Training under Packet Loss" (Weintraub, Banner, Orda,
    arXiv 2507.07114) in the layout of ZeRO-1. Parameters live in flat buckets, of which each rank
    owns an equal chunk. Gradients go to their owners by a lossy reduce-scatter, bucket by bucket
    while the backward pass goes on; the mean is unbiased also with different data on each rank, as
    long as an owner gets the packet of one other rank (own data is a stratum of its own,
    docs/design.md). That it gets none has a chance of p^(world - 1): with two or three ranks and
    much loss, ``error_feedback`` is unbiased where this isn't. Owners step their chunks, cut
    into fragments of parameters, and send *parameters* to all: a packet that is lost leaves the old
    value, which the next step's replaces, so replicas don't drift apart. What steers a step (norms,
    NaN, which parameters had gradients) travels reliably, so all ranks do the same.

    ``params``: parameters, (name, parameter) pairs or groups (dicts), as torch's optimizers take
    them, and in the same order on all ranks; their values become rank 0's. Each once, however often
    it is tied. Those with ``requires_grad=False`` are left out (see :meth:`add_param_group`).
    Parameters become views of the buckets, so move or convert the model before.

    ``optimizer_class``, ``**defaults``: any torch.optim.Optimizer that is element-wise, with its
    options.

    ``group``: the ranks to share with, of a backend that serves CPU tensors too (None: the default
    group). Only with "lossy" is anything ever lost; in a block of ``lossycoll.reliable()``, or with
    ``delivery="reliable"``, nothing is. ``with lossycoll.lossy(repair=4):`` around ``backward()``
    works, too.

    ``max_age``: how many steps old a block (a packet's worth of an owner's chunk) may be at a
    replica. A block that is missing for the ``max_age``-th step in a row is sent again in the next
    one until it arrives, so after a step none is older than ``max_age``. 0: replicas are always
    equal, and only gradients lossy. None: no bound. "auto": 3, but 0 for owners of whose blocks
    more than 2% stay away, which costs quality; one in 16 of theirs still may be stale, to tell by.
    All blocks that are due are repaired at once, in the step in which they are due.

    ``repair``: rounds of selective resending within a step, of gradients and of parameters, after
    which p^(repair + 1) is lost; more where the block of code or the group says so. The published
    method is 0, with ``max_age=None``. What is lost makes gradients noisier, and a stale parameter
    costs far more than its bytes while steps are large (docs/quality.md). Two rounds resend p + p^2
    of the packets.

    ``error_feedback``: what is lost of a rank's gradients is added to its next ones, in place of
    weighing what arrives by its count. Nothing of any gradient is lost then, but some of it comes a
    step or more late; and a gradient's worth of memory is needed. With one link at 100% loss
    its rank's gradients never arrive, and pile up: :meth:`residue` tells. A checkpoint has what
    its ranks still owe together, and those that load it owe it again.

    ``compression``: an ARCTopKState, by which gradients are compressed on their way instead: in
    place of a reduction to their owners all ranks get what is used of them, which costs no more
    than half the bytes below a ratio of 1/4. Parameters are sent as ever. It has an error feedback
    of its own, and a memory that each rank saves and loads by itself (by its ``state_dict()``);
    with a GradScaler the scale must stay as it is.

    ``bucket_bytes``: the size of a bucket, 25 MiB as DDP's (the first one at most 1 MiB).

    ``on_nonfinite``: what ``step()`` does when a rank's gradient holds NaN or infinity: "raise" a
    NonFiniteError, or "skip" the step, on all ranks alike. A GradScaler needs neither: every rank's
    fragments then hold infinity, so that all of them skip and lower the scale together.

    ``param_groups`` and ``state`` are the inner optimizer's own: over this rank's fragments, with
    the options that schedulers and users change (on all ranks alike). Between ``backward()`` and
    ``step()`` the fragments' gradients are the mean, to look at or change; else there are none. The
    model's are this rank's own, which have been sent: changing those is refused by ``step()``, as
    far as torch notices it (not of ``grad.data``). Hence :meth:`clip_grad_norm_` instead of
    torch.nn.utils'. In the first group a parameter of one element is lent, which tells of a
    GradScaler's scale, and of one that comes before gradients are reduced.

    All ranks must make it alike, and call ``backward()`` (outside of :meth:`no_sync`), ``step()``
    and whatever says so below equally often. A second ``backward()`` before ``step()`` reduces the
    accumulated gradients anew: correct, but :meth:`no_sync` saves the first. Buffers, such as batch
    normalisation's, are not sent. Needs memory for each parameter's gradient twice (as DDP does)
    and for 1/world of the optimizer's state.

    Raises OptionError for a bad argument; UnsupportedError for an optimizer that isn't
    element-wise, and for parameters that are sparse, lazy, sharded, not floats, that share memory
    or (in a lossy group) aren't on the CPU; MismatchError where ranks differ in parameters or
    arguments. ``backward()`` and ``step()`` raise PeerLostError when a rank is lost, whose shard
    has no owner any more, and LinkError, as the constructor does, when a link delivers nothing;
    ``step()`` also when a block that is due doesn't come, and TrainingError for what would go wrong
    in silence: changed gradients, moved parameters, frozen ones that have gradients, fragments'
    gradients that were unscaled or clipped before :meth:`reduce_gradients`.

    Several optimizers may share a group, and what each rank's backward pass touches of them may
    differ; their gradients leave when the pass ends, and not while it goes on.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        max_age: int | str | None = AUTO,
        repair: int = REPAIR,
        error_feedback: bool = False,
        compression: ARCTopKState | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        on_nonfinite: str = "raise",
        **defaults: Any,
    ) -> None:
        _check_arguments(max_age, repair, bucket_bytes, on_nonfinite)
        _check_memory(error_feedback, compression)
        settings = {
            "optimizer_class": getattr(optimizer_class, "__name__", ""),
            "max_age": max_age,
            "repair": repair,
            "error_feedback": error_feedback,
            "compression": None if compression is None else compression.settings,
            "bucket_bytes": bucket_bytes,
            "on_nonfinite": on_nonfinite,
        }
        self._inner: Optimizer | None = None
        self._on_nonfinite = on_nonfinite
        self._exchange = Exchange(group, repair)
        self._held = Held(self._exchange, optimizer_class, defaults, settings)
        self._copies = Copies(self._exchange, max_age)
        self._reducer = Reducer(
            self._exchange,
            self._held.name,
            self._receive,
            feedback=error_feedback,
            compression=None if compression is None else Compressor(compression, self._exchange),
        )
        self._carrier = Carrier()
        self._reduced: Status | None = None
        """Of the backward pass whose gradients the next step takes."""
        self._consolidated: dict[str, Any] | None = None
        super().__init__(params, {})
        self._groups = self.param_groups
        """As the caller gave them: the model's parameters, and the options that were written."""
        fragments = self._take(self._groups, 0)
        pairs = zip(self._groups, fragments, strict=True)
        self._inner = optimizer_class(
            [{**options(entry), "params": members} for entry, members in pairs], **defaults
        )
        self.defaults = self._inner.defaults
        self._adopt()
        self._clear()
        self._reducer.join()

    # ---- parameters ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, in buckets of their own. All ranks must call this alike, and not within
        a backward pass. Gradients that have been reduced stay as they are; those of what is added
        must come from later passes, or be sent by :meth:`reduce_gradients`.

        A parameter that was frozen when the optimizer was made, and has ``requires_grad`` now,
        moves to the new group.
        """
        if self._inner is None:
            super().add_param_group(param_group)
            return
        added = dict(param_group)
        added["params"] = (
            [added["params"]] if isinstance(added["params"], Tensor) else list(added["params"])
        )
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in added["params"]]
        thawed = {p for p in tensors if p in self._held.frozen and p.requires_grad}
        before = [list(entry["params"]) for entry in self._groups]
        for entry in self._groups:
            entry["params"] = [p for p in entry["params"] if p not in thawed]
        self.param_groups = self._groups
        try:
            super().add_param_group(added)
            number = len(self._groups) - 1
            fragments = self._take(self._groups[number:], number)[0]
        except BaseException:
            for entry, members in zip(self._groups, before, strict=False):
                entry["params"] = members
            del self._groups[len(before) :]
            raise
        finally:
            self.param_groups = self._inner.param_groups
        self._inner.add_param_group({**options(added), "params": fragments})
        names = checkpoint.elementwise_of(self._held.frozen, self._held.elementwise)
        for each in self._held.owned:
            state = self._held.frozen.get(self._held.model[each.index])
            if state:
                self._inner.state[each.parameter] = checkpoint.part_of(each.fragment, state, names)
        for parameter in thawed:
            del self._held.frozen[parameter]
        self._consolidated = None

    def _take(self, groups: Sequence[dict[str, Any]], number: int) -> list[list[Parameter]]:
        """This rank's fragments of new groups, the first of which is group ``number``."""
        held = self._held
        parameters, shards = len(held.model), len(held.shards)
        fragments = held.take(groups, number)
        self._reducer.watch(held.model[parameters:], held.shards[shards:])
        self._copies.add(held.shards[shards:])
        return fragments

    def _adopt(self) -> None:
        """What schedulers, scalers and users see is the inner optimizer's own."""
        assert self._inner is not None
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    # ---- gradients ----

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block whose backward passes add to ``grad`` and send nothing, as DDP's."""
        return self._reducer.no_sync()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share it."""
        return self._exchange.group

    @property
    def sharded_parameters(self) -> Sequence[Parameter]:
        """The model's parameters that are trained, in order of registration."""
        return tuple(self._held.model)

    def reduce_gradients(self) -> None:
        """Sends what blocks of :meth:`no_sync` have accumulated, as the end of a backward pass
        outside of them does. All ranks must call this. ``step()`` and :meth:`clip_grad_norm_` do it
        if nobody has, but a GradScaler, and whatever else looks at ``param_groups``, needs it
        before."""
        self._exchange.check_owners()
        self._held.check_sound()
        self._reducer.finish()

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiplies the mean that the last pass has left, in ``param_groups``. All ranks must call
        this alike."""
        for each in self._held.owned:
            if each.parameter.grad is not None:
                each.parameter.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters, and those of this rank's fragments."""
        for parameter in (*self._held.model, *self._held.frozen):
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()
        self._no_step()
        self._reducer.abandon()
        self._reducer.forget()
        self._clear()

    def _clear(self) -> None:
        """Nothing has been reduced: fragments have no gradients, and what is done to the carrier's
        tells of somebody who takes what there is for them."""
        self._reduced = None
        for each in self._held.owned:
            each.parameter.grad = None
        self._lend()

    def _lend(self) -> list[Tensor]:
        """The carrier anew; its gradient, if there is anything to train."""
        self._carrier.take_back()
        like = self._held.model[:1]
        return [self._carrier.lend(self.param_groups[0]["params"], each) for each in like]

    def _receive(self, status: Status) -> None:
        """A backward pass has been reduced: hands the fragments their gradients."""
        if self._reduced is None and self._carrier.was_changed():
            raise TrainingError(
                f"{self._exchange}: a GradScaler has unscaled the gradients of "
                f"optimizer.param_groups, or they were changed, before they were reduced, which "
                f"has no effect on them; call optimizer.reduce_gradients() on all ranks after the "
                f"last backward pass within no_sync(), before scaler.unscale_() and scaler.step(); "
                f"now begin this step anew with optimizer.zero_grad() and scaler.update()"
            )
        self._no_step()
        self._reduced = status
        used = status.used
        for each in self._held.owned:
            each.parameter.grad = each.grad if used[each.index] else None
        held = [each.grad for each in self._held.owned if used[each.index]]
        if not any(used):
            self._carrier.take_back()
        elif not held:
            held = self._lend()
        if status.bad:
            # A GradScaler looks at this rank's gradients only, and all must skip this step.
            for grad in held:
                grad.fill_(math.inf)

    def _no_step(self) -> None:
        """None is taken any more with the last pass. Where a GradScaler has refused one, its scale
        is known, and that it is about to halve: too small a scale makes what was lost come later,
        too large a one makes it more than it was."""
        scale = self._carrier.scale()
        if scale != 1.0:
            bad = self._reduced is not None and self._reduced.bad
            self._reducer.rescale(scale / 2 if bad else scale)
        self._clear()

    def _reduce(self) -> Status:
        """The status of the gradients as they are; reduces them if no backward pass has.

        Raises if a step with them would be wrong.
        """
        self._exchange.check_owners()
        self._held.check_sound()
        if self._reduced is None:
            self._reducer.finish()
        else:
            index = self._reducer.changed()
            if index is not None:
                if self._carrier.was_changed():
                    self._reduced = None  # nor may it be reduced anew after it was unscaled
                raise TrainingError(
                    f"{self._exchange}: the gradient of {self._held.name(index)} was changed "
                    f"after the backward pass had sent it, which has no effect; clip by "
                    f"optimizer.clip_grad_norm_(max_norm), change the gradients of "
                    f"optimizer.param_groups instead, or change them by hooks that are registered "
                    f"before the optimizer is made; if a backward pass within no_sync() came "
                    f"after that, or parameters were added, call optimizer.reduce_gradients(), "
                    f"before scaler.unscale_() if there is one; and don't wrap the model in "
                    f"DistributedDataParallel"
                )
        assert self._reduced is not None
        return self._reduced

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the averaged gradient down to norm ``max_norm``, as torch.nn.utils' does.

        Over the parameters of all ranks; the norm travels reliably, so all scale alike. Returns the
        norm before, float64 of no dimension, the same on all ranks. After ``unscale_``, if a
        GradScaler is used. All ranks must call this.
        """
        norm_type = float(norm_type)  # torch takes "inf", too
        if not norm_type > 0:
            raise OptionError(f"norm_type is {norm_type!r}, wanted a number above 0, or infinity")
        self._reduce()
        members = (p for g in self.param_groups for p in g["params"] if not self._carrier.is_(p))
        grads = [member.grad for member in members if member.grad is not None]
        device = self._held.model[0].device if self._held.model else torch.device("cpu")
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
        for grad in grads:
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
            norms.append(norm.to(device))
        local = torch.stack(norms)
        highest = math.isinf(norm_type)
        total = local.max() if highest else local.pow(norm_type).sum()
        op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
        with self._exchange.owners_needed():
            self._exchange.combine(total, op).wait()
        if not highest:
            total = total.pow(1.0 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return total

    # ---- a step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's fragments, and sends them to all. All ranks must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        bad = self._reduce().bad
        scale = self._carrier.scale()
        self._carrier.take_back()
        if bad:
            self._refuse(bad)
            return loss
        self._reduced = self._consolidated = None
        self._inner.step()
        self._clear()
        self._reducer.keep_lost(scale)
        self._copies.spread(self._held.model)
        return loss

    def _refuse(self, bad: Sequence[int]) -> None:
        """The gradients of ranks ``bad`` are not numbers."""
        if self._on_nonfinite == "skip":
            self._clear()
            self._copies.skip()
            return
        who = ", ".join(self._exchange.peer(rank) for rank in bad)
        raise NonFiniteError(
            f"{self._exchange}: the gradient of {who} holds NaN or infinity, and no rank took a "
            f"step; lower the learning rate or clip, use a torch.amp.GradScaler with float16, "
            f"or skip such steps by on_nonfinite='skip'",
            bad,
        )

    # ---- replicas and figures ----

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Makes all replicas equal, bit for bit: every rank gets all owners' parameters, reliably.

        All ranks must call this.
        """
        self._copies.synchronize(self._held.model)

    def ages(self) -> tuple[int, ...]:
        """How many blocks of other ranks' parameters are 0, 1, 2, ... steps old here."""
        return self._copies.ages()

    def residue(self) -> float:
        """L2 norm of this rank's gradients that were lost, and come with its next ones; 0 without
        error feedback."""
        return self._reducer.residue()

    def figures(self) -> ShardedFigures:
        """What has happened at this rank since the optimizer was made."""
        return self._copies.figures

    # ---- checkpoints ----

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Makes replicas equal, then brings the state of all ranks to rank ``to`` of the group,
        where :meth:`state_dict` returns it until the next step. All ranks must call this.
        """
        assert self._inner is not None
        if not 0 <= to < self._exchange.world:
            raise OptionError(
                f"{self._exchange}: to is {to}, wanted a rank, 0 to {self._exchange.world - 1}"
            )
        self.synchronize_parameters()
        self._consolidated = None
        state = checkpoint.consolidate(self._exchange, self._held, self._inner.state, to)
        if state is not None:
            groups = checkpoint.pack_groups(self.param_groups, self._groups)
            self._consolidated = {
                "state": checkpoint.numbered(state, self._groups),
                "param_groups": groups,
            }
        if self._reducer.feedback:
            owed = checkpoint.consolidate_owed(self._exchange, self._held, self._reducer.lost(), to)
            if self._consolidated is not None:
                self._consolidated[checkpoint.OWED] = checkpoint.numbered(owed, self._groups)

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's over the same parameters, so that it loads there, and at any
        number of ranks. Only on the rank that :meth:`consolidate_state_dict` has brought it to.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None:
            raise CheckpointError(
                f"{self._exchange}: no rank has the whole state; call "
                f"optimizer.consolidate_state_dict(to=...) on all ranks after the last step, and "
                f"state_dict() on that rank only"
            )
        out = self._consolidated
        for after in self._optimizer_state_dict_post_hooks.values():
            out = after(self, out) or out
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict`, or the plain optimizer's, has returned, at whatever number
        of ranks. All ranks must load the same; the model's parameters are loaded by the model.

        Raises CheckpointError where groups, counts or shapes don't fit; then nothing has changed.
        """
        assert self._inner is not None
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        states = checkpoint.by_parameter(state_dict, self._groups, str(self._exchange))
        saved = state_dict["param_groups"]
        elementwise = checkpoint.elementwise_of(states, self._held.elementwise)
        for parameter, name in zip(self._held.model, self._held.names, strict=True):
            shape = tuple(parameter.shape)
            checkpoint.check_state(states.get(parameter, {}), shape, elementwise, name)
        owed = checkpoint.owed(state_dict, self._groups, self._held, str(self._exchange))
        self._carrier.take_back()
        dealt = checkpoint.deal(states, saved, self.param_groups, self._held, elementwise)
        self._inner.load_state_dict(dealt)
        self._held.frozen = {p: dict(states.get(p, {})) for p in self._held.frozen}
        self._adopt()
        self._lend()
        self._reducer.replace_lost(owed)
        if owed and not self._reducer.feedback:
            log.warning(
                "%s: the checkpoint has gradients that were lost and are still to be sent, which "
                "are left out; make the optimizer with error_feedback=True to send them",
                self._exchange,
            )
        self._consolidated = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_arguments(
    max_age: object, repair: object, bucket_bytes: object, on_nonfinite: object
) -> None:
    if max_age not in (None, AUTO) and not is_whole(max_age, 0):
        raise OptionError(
            f"max_age is {max_age!r}, wanted a number of steps from 0 on, {AUTO!r} or None"
        )
    if not is_whole(repair, 0, MOST_REPAIR):
        raise OptionError(f"repair is {repair!r}, wanted a number of rounds, 0 to {MOST_REPAIR}")
    if not is_whole(bucket_bytes, 1):
        raise OptionError(f"bucket_bytes is {bucket_bytes!r}, wanted a number of bytes from 1 on")
    if on_nonfinite not in ("raise", "skip"):
        raise OptionError(f"on_nonfinite is {on_nonfinite!r}, wanted 'raise' or 'skip'")


def _check_memory(error_feedback: object, compression: object) -> None:
    """Two things would remember what wasn't sent."""
    if not isinstance(error_feedback, bool):
        raise OptionError(f"error_feedback is {error_feedback!r}, wanted True or False")
    if compression is not None and not isinstance(compression, ARCTopKState):
        raise OptionError(f"compression is {compression!r}, wanted an ARCTopKState or None")
    if compression is not None and error_feedback:
        raise OptionError(
            "error_feedback is True, wanted False with compression, whose state has its own "
            "(ARCTopKState(error_feedback=...))"
        )

"""ShardedOptimizer: each rank steps its own shard of the parameters, and sends it to all.

Long because it has all that a torch optimizer has, with its documentation; the work is done by the
modules around it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lossycoll.errors import CheckpointError, NonFiniteError, OptionError, TrainingError
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.layout import BUCKET_BYTES
from lossycoll.train.compress.arc_topk import ARCTopKState

from . import checkpoint
from .backup import ShardBackup, assembled, gathered
from .backward_pass import PassStatus, ScalerProbe, total_norm
from .checkpoint import FragmentState
from .gradient_reducer import GradientReducer
from .module_waits import ModuleWaits
from .parameter_store import ModelGroups, ParameterStore, options
from .parameter_sync import ParameterSync, ShardedStats
from .settings import AUTO, ShardedSettings

log: Final = logging.getLogger("lossycoll")


class ShardedOptimizer(Optimizer):
    """Optimizer sharded over ranks whose network loses packets.

    Use it in place of DistributedDataParallel and a torch optimizer: it reduces the gradients
    itself, during the backward pass. docs/guide.md has an example and the rules of use. The method
    is that of "Distributed Training under Packet Loss" (Weintraub, Banner, Orda, arXiv 2507.07114)
    in the layout of ZeRO-1; ``repair=0, max_age=None`` is the published method.

    Args:
        params: Parameters, (name, parameter) pairs or groups, in the same order on all ranks.
        optimizer_class: A torch.optim.Optimizer class; it must be element-wise unless ``whole`` is
            set.
        group: Ranks that share the optimizer, of a backend that serves the model's tensors. None:
            the default.
        model: Module that has all the parameters. With it, each submodule waits for its own
            parameters when it runs. None: :meth:`step` returns when all parameters are here.
        max_age: Maximum age of a replica's value, in steps. 0: replicas are equal. None: no bound.
            "auto": 3, or 0 for owners with more than 2% of their blocks undelivered; no bound with
            ``max_missing`` and ``repair=0``.
        max_missing: Maximum share of missing packets in a step. None: 0.01, unless
            ``repair`` is given, or the group was made with ``max_missing``, ``repair`` or ``fec``.
        repair: Minimum number of rounds of selective resending in a step, 0 to 255. None: 0.
        error_feedback: Whether lost gradients are added to the next step's.
        compression: An ARCTopKState that compresses gradients, instead of a lossy mean.
        bucket_bytes: Size of a bucket in bytes; the first bucket has at most 1 MiB.
        on_nonfinite: Action when a gradient holds NaN or infinity: "raise" an error or "skip" the
            step.
        wire: Encoding of float32 between hosts, as the option: "int8" for gradients and parameters,
            "int4/int8" for each of them, "int8/same" for gradients alone. Parameters travel as
            differences from the value that all replicas hold, which takes 8 more bytes of memory
            per parameter. None: gradients use the group's encoding, and parameters none.
        whole: Whether each parameter belongs uncut to one rank, for optimizers that step matrices,
            such as torch.optim.Muon. Parameters that aren't matrices need another ShardedOptimizer
            beside it.
        **defaults: Options of ``optimizer_class``.

    Raises:
        OptionError: An argument has a bad value.
        UnsupportedError: The optimizer or a parameter can't be sharded.
        MismatchError: Ranks differ in parameters or arguments.
        LinkError: A link delivers nothing.
    """

    _made = False

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        max_age: int | str | None = AUTO,
        max_missing: float | None = None,
        repair: int | None = None,
        error_feedback: bool = False,
        compression: ARCTopKState | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        on_nonfinite: str = "raise",
        wire: str | None = None,
        whole: bool = False,
        **defaults: Any,
    ) -> None:
        settings = ShardedSettings(
            *(max_age, max_missing, repair, error_feedback, compression, bucket_bytes),
            on_nonfinite,
            wire,
            whole,
        )
        self._settings = settings
        self._collectives = Collectives(group, recovery=settings.recovery, wire=settings.encodings)
        if self._collectives.lossy is not None:
            self._collectives.lossy.lossy_made_up_for()
        self._store = ParameterStore(
            self._collectives, ModelGroups(params), settings, optimizer_class, defaults
        )
        # Blocks that are too old are resent: not by "auto" where nothing shall be.
        bounded = max_age != AUTO or not self._collectives.resends_nothing
        self._parameter_sync = ParameterSync(self._store, max_age if bounded else None)
        self._waits = None if model is None else ModuleWaits(model, self._parameter_sync)
        self._reducer = GradientReducer(
            self._store,
            self._parameter_sync,
            self._receive,
            feedback=error_feedback,
            compression=compression,
        )
        self._probe = ScalerProbe()
        self._reduced: PassStatus | None = None
        """The status of the backward pass whose gradients the next step takes."""
        self._consolidated: dict[str, Any] | None = None
        """Result of :meth:`state_dict`."""
        self.shard_era: int = 0
        """Number of times that shards were restored, by this optimizer and those before it."""
        self._inner = optimizer_class(self._take(0), **defaults)
        # What schedulers, scalers and users see is the inner optimizer's own.
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._made = True
        self._adopt()
        self._clear()
        self._reducer.join()

    # ---- parameters ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in buckets of their own.

        All ranks must call this with the same parameters, outside a backward pass. Gradients that
        have been reduced stay as they are. Gradients of the new parameters must come from later
        backward passes, or be sent by :meth:`reduce_gradients`. A parameter that was frozen when
        the optimizer was made, and requires gradients now, moves to the new group.

        Args:
            param_group: Group in the form of torch's optimizers: ``params``, and options.

        Raises:
            UnsupportedError: A parameter can't be sharded. Nothing has changed.
            MismatchError: Ranks add different parameters. Nothing has changed.
        """
        if not self._made:  # torch's constructor, with the inner optimizer's groups
            super().add_param_group(param_group)
            return
        store = self._store
        with store.groups.adding(param_group, store.frozen) as thawed:
            (added,) = self._take(len(store.groups.param_groups) - 1)
        self._inner.add_param_group(added)
        # A checkpoint may have had state of what was frozen.
        names = checkpoint.elementwise_of(store.frozen, store.elementwise)
        for each in store.owned:
            state = store.frozen.get(store.model[each.index])
            if state:
                self._inner.state[each.parameter] = checkpoint.part_of(
                    each.fragment, state, names, each.parameter.device
                )
        for parameter in thawed:
            del store.frozen[parameter]
        self._consolidated = None

    def _take(self, number: int) -> list[dict[str, Any]]:
        """This rank's fragments of the groups from ``number`` on, in groups."""
        store = self._store
        if self._waits is not None:
            groups = store.groups.param_groups[number:]
            self._waits.check(p for each in groups for p in each["params"])
        shards = len(store.shards)
        taken = store.take(number)
        self._reducer.watch(store.shards[shards:])
        self._parameter_sync.add(store.shards[shards:])
        return taken

    def _adopt(self) -> None:
        self.param_groups: Any = self._inner.param_groups
        self.state: Any = self._inner.state

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that share the optimizer."""
        return self._collectives.group

    @property
    def sharded_parameters(self) -> Sequence[Parameter]:
        """The model's parameters that are trained, in order of registration."""
        return tuple(self._store.model)

    # ---- gradients ----

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager whose backward passes add to ``grad`` and send nothing, as in DDP."""
        return self._reducer.no_sync()

    def reduce_gradients(self) -> None:
        """Send the gradients that backward passes under :meth:`no_sync` have accumulated.

        A backward pass outside of ``no_sync`` does the same at its end; otherwise :meth:`step` and
        :meth:`clip_grad_norm_` do. Call this before a GradScaler, or any other code, reads
        ``param_groups``. All ranks must call this.

        Raises:
            PeerLostError: A rank is lost, and its shard has no owner.
            TrainingError: A parameter was moved, or a frozen parameter has a gradient.
        """
        self._parameter_sync.settle()
        self._store.check_sound()
        self._reducer.finish()

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the averaged gradients in ``param_groups``. All ranks must call this alike.

        Args:
            factor: Factor, the same on all ranks.
        """
        for each in self._store.owned:
            if each.parameter.grad is not None:
                each.parameter.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters and of this rank's fragments.

        Args:
            set_to_none: Whether the model's gradients become None rather than zeros.
        """
        self._store.groups.zero_grad(set_to_none)
        self._drop_pass()
        if self._reducer.is_open:  # a pass has raised: the others have submitted all of it
            self._reducer.finish()
        self._reducer.forget()
        self._clear()

    def _clear(self) -> None:
        """Nothing has been reduced: fragments have no gradients, and a change of the probe's shows
        that somebody takes what there is for them."""
        self._reduced = None
        for each in self._store.owned:
            each.parameter.grad = None
        self._attach_probe()

    def _attach_probe(self) -> list[Tensor]:
        """Attaches the probe anew; returns its gradient, if there is anything to train."""
        self._probe.detach()
        like = self._store.model[:1]
        return [self._probe.attach(self.param_groups[0]["params"], each) for each in like]

    def _receive(self, status: PassStatus) -> None:
        """A backward pass has been reduced: hands the fragments their gradients."""
        if self._reduced is None and self._probe.was_changed():
            raise TrainingError(
                f"{self._collectives}: a GradScaler has unscaled the gradients of "
                f"optimizer.param_groups, or they were changed, before they were reduced, which "
                f"has no effect on them; call optimizer.reduce_gradients() on all ranks after the "
                f"last backward pass within no_sync(), before scaler.unscale_() and scaler.step(); "
                f"now begin this step anew with optimizer.zero_grad() and scaler.update()"
            )
        self._drop_pass()
        self._reduced = status
        used = status.used.tolist()
        for each in self._store.owned:
            each.parameter.grad = each.grad if used[each.index] else None
        grads = [each.grad for each in self._store.owned if used[each.index]]
        if not any(used):
            self._probe.detach()
        elif not grads:
            grads = self._attach_probe()
        if status.bad:
            # A GradScaler looks at this rank's gradients only, and all must skip this step.
            for grad in grads:
                grad.fill_(math.inf)

    def _drop_pass(self) -> None:
        """No step is taken with the last pass any more.

        Where a GradScaler has refused one, its scale is known, and that it is about to halve. Too
        small a scale makes a residual come later, too large a one makes it more than it was.
        """
        scale = self._probe.scale()
        if scale != 1.0:
            bad = self._reduced is not None and self._reduced.bad
            self._reducer.scale = scale / 2 if bad else scale
        self._clear()

    def _reduce(self) -> PassStatus:
        """The status of the gradients as they are; reduces them if no backward pass has.

        Raises if a step with them would be wrong.
        """
        self._parameter_sync.settle()
        self._store.check_sound()
        if self._reduced is None:
            self._reducer.finish()
        elif (index := self._reducer.changed()) is not None:
            if self._probe.was_changed():
                self._reduced = None  # nor may it be reduced anew after it was unscaled
            raise TrainingError(
                f"{self._collectives}: the gradient of {self._store.names[index]} was changed "
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
        """Scale the averaged gradient down to norm ``max_norm``, as torch.nn.utils does.

        The norm covers the parameters of all ranks. It travels reliably, so all ranks scale alike.
        Call it after ``scaler.unscale_`` if you use a GradScaler. All ranks must call this.

        Args:
            max_norm: Maximum norm.
            norm_type: The p of the p-norm: a number above 0, or infinity.

        Returns:
            The norm before scaling, float64 of shape (), the same on all ranks.

        Raises:
            OptionError: ``norm_type`` isn't above 0.
            TrainingError: Gradients were changed after they had been sent.
        """
        norm_type = float(norm_type)  # torch takes "inf", too
        if not norm_type > 0:
            raise OptionError(f"norm_type is {norm_type!r}, wanted a number above 0, or infinity")
        self._reduce()
        members = [p for g in self.param_groups for p in g["params"] if not self._probe.is_dummy(p)]
        grads = [p.grad for p in members if p.grad is not None]
        device = self._store.model[0].device if self._store.model else torch.device("cpu")
        norm = total_norm(grads, norm_type, device, self._collectives)
        nn.utils.clip_grads_with_norm_(members, max_norm, norm)
        return norm

    # ---- a step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's fragments, and send them to all ranks. All ranks must call this.

        Args:
            closure: Function that computes the loss and calls ``backward()``.

        Returns:
            The result of ``closure``, or None.

        Raises:
            NonFiniteError: A gradient holds NaN or infinity, and ``on_nonfinite`` is "raise".
            PeerLostError: A rank is lost, and its shard has no owner.
            LinkError: A block that is due by ``max_age`` didn't arrive.
            TrainingError: The step would be wrong: gradients were changed, or unscaled before they
                were reduced; parameters were moved, or frozen ones have gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        status = self._reduce()
        bad = status.bad
        scale = self._probe.scale()
        self._probe.detach()
        if bad and self._settings.on_nonfinite == "raise":
            who = ", ".join(map(self._collectives.peer, bad))
            raise NonFiniteError(
                f"{self._collectives}: the gradient of {who} holds NaN or infinity, and no rank "
                f"took a step; lower the learning rate or clip, use a torch.amp.GradScaler with "
                f"float16, or skip such steps by on_nonfinite='skip'",
                bad,
            )
        if bad:
            self._clear()
            self._parameter_sync.skip()
            return loss
        self._reduced = self._consolidated = None
        self._parameter_sync.settle_owed()
        self._inner.step()
        self._clear()
        self._reducer.keep_lost(scale)
        self._parameter_sync.begin(whole=bool(status.written))
        if self._waits is None:
            self._parameter_sync.settle()
        return loss

    # ---- replicas and figures ----

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Make all replicas equal, bit for bit: each owner's parameters go to all ranks reliably.

        All ranks must call this.
        """
        self._parameter_sync.synchronize()

    def wait_parameters(self) -> None:
        """Wait until the last step's parameters have arrived here and at all other ranks.

        Call it before code outside of the model's forward pass reads or changes parameters, if the
        optimizer was given ``model``. It sends nothing, so ranks need not call it alike.
        """
        self._parameter_sync.close()

    def ages(self) -> tuple[int, ...]:
        """Numbers of other ranks' parameter blocks that are 0, 1, 2, ... steps old here."""
        return self._parameter_sync.ages()

    def residual_norm(self) -> float:
        """L2 norm of this rank's residual: its lost gradients, which are added to the next step's.

        Returns:
            The norm; 0 without error feedback.
        """
        return math.hypot(*(float(torch.linalg.vector_norm(r)) for r in self._reducer.residuals()))

    def stats(self) -> ShardedStats:
        """Return this rank's counts since the optimizer was made."""
        return self._parameter_sync.stats

    # ---- checkpoints ----

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Make replicas equal, then gather the state of all ranks at one rank of the group.

        That rank's :meth:`state_dict` returns the state until the next step. All ranks must call
        this.

        Args:
            to: Rank of the group that gets the state.

        Raises:
            OptionError: ``to`` isn't a rank of the group.
            PeerLostError: A rank is lost, and its part of the state with it.
        """
        if not 0 <= to < self._collectives.world:
            raise OptionError(
                f"{self._collectives}: to is {to}, wanted a rank, 0 to "
                f"{self._collectives.world - 1}"
            )
        self.synchronize_parameters()
        self._consolidated = None
        residuals = self._reducer.residuals() if self._reducer.feedback else None
        self._consolidated = checkpoint.save(self._store, self._inner, residuals, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the plain optimizer's form, which loads there and at any number of
        ranks.

        Returns:
            The state of all ranks.

        Raises:
            CheckpointError: :meth:`consolidate_state_dict` gathered the state at another rank, or a
                step was taken since.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None:
            raise CheckpointError(
                f"{self._collectives}: no rank has the whole state; call "
                f"optimizer.consolidate_state_dict(to=...) on all ranks after the last step, and "
                f"state_dict() on that rank only"
            )
        out = self._consolidated
        for after in self._optimizer_state_dict_post_hooks.values():
            out = after(self, out) or out
        return out

    def shard_state(self) -> tuple[list[FragmentState], list[dict[str, Any]]]:
        """Return the state that only this rank has, by fragment, and the options of each group."""
        fragments = checkpoint.states_of(self._store.owned, self._inner.state)
        return fragments, [options(group) for group in self._inner.param_groups]

    @torch.no_grad()
    def restore_shards(self, backup: ShardBackup | None) -> bool:
        """Restore the state of a former group's ranks, from the ranks and from backup copies.

        All ranks must call this, after the model has been restored. With error feedback, gradients
        that were lost stay lost.

        Args:
            backup: Backup of the last optimizer, on ranks that have one; None on others.

        Returns:
            Whether a state was found; if no rank has one, nothing changes.

        Raises:
            CheckpointError: Both the owner of a shard and the holder of its copy are gone, or the
                state is another model's. Nothing has changed.
        """
        states = gathered(backup, self.group)
        if not states:
            return False
        self.load_state_dict(assembled(states, self._store))
        self.shard_era = 1 + states[0].era
        return True

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict`, or the plain optimizer's, has returned.

        All ranks must load the same state; their number may differ from the saved one. Load the
        model's parameters into the model.

        Args:
            state_dict: ``state`` by number, ``param_groups``, and residuals if there are any.

        Raises:
            CheckpointError: Groups, counts or shapes don't fit. Nothing has changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        store = self._store
        loaded = checkpoint.read(state_dict, store)
        self._probe.detach()
        self._inner.load_state_dict(checkpoint.deal(loaded, self.param_groups, store))
        store.frozen = {p: dict(loaded.states.get(p, {})) for p in store.frozen}
        self._adopt()
        self._attach_probe()
        self._reducer.replace_residuals(loaded.residuals)
        if loaded.residuals and not self._reducer.feedback:
            log.warning(
                "%s: the checkpoint has gradients that were lost and are still to be sent, which "
                "are left out; make the optimizer with error_feedback=True to send them",
                self._collectives,
            )
        self._consolidated = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

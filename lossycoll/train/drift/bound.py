"""DriftBound: bounds the drift of replicas that step by themselves.

Under plain DDP with lossy gradients each replica steps with a slightly different mean, so their
squared distance grows with every step. Broadcasting parameters bounds it ("Distributed Training
under Packet Loss", Weintraub, Banner, Orda, arXiv 2507.07114, stage 2); here a slice at a time,
which travels while the next step's forward and backward pass run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import LinkError, LossyError, OptionError, UnsupportedError
from lossycoll.options.ranges import is_whole
from lossycoll.train.common.collectives import BlockGather, Collectives
from lossycoll.train.common.consistency import PARAMETERS_DIFFER, Agreement, as_line, check_same
from lossycoll.train.common.delivery import Mask, Recovery
from lossycoll.train.common.models import in_memory_order, steps_of
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .slices import (
    Source,
    device_of,
    group_of,
    layout_of,
    slice_owner,
    slice_up,
    sources_of,
    stepped,
)

BLOCKS: Final = 256  # so many in a row are lost once in 5e11 times, at 90% loss
SWEEPS: Final = 2
KNOWN_STEPS: Final = 2
log: Final = logging.getLogger("lossycoll")


class SilentOwners:
    """The steps and blocks, by owner, since one of its blocks last arrived at this rank."""

    def __init__(self, rank: int, world: int, period: int) -> None:
        self._rank = rank
        self._period = period
        self.since = np.full(world, np.inf)  # when one last arrived, at first the first step's time
        self.blocks = np.zeros(world, np.int64)  # blocks that were lost since, by owner
        self.steps = np.zeros(world, np.int64)  # steps since, by owner

    def note(self, arrived: Mask, now: float) -> None:
        came = arrived.any(axis=1) | (np.arange(len(arrived)) == self._rank)
        self.blocks = np.where(came, 0, self.blocks + arrived.shape[1])
        self.steps = np.where(came, 0, self.steps + 1)
        self.since = np.where(came, now, np.minimum(self.since, now))

    def dead(self, now: float, link_timeout: float, known: Collection[int] = ()) -> list[int]:
        """Ranks of owners of whom nothing arrived in SWEEPS sweeps, BLOCKS blocks and the timeout.

        A link that is away for less has only lost much. Links in ``known``, which the engine has
        found dead, need not be waited for through so many steps.
        """
        silent = (self.steps >= SWEEPS * self._period) & (now - self.since >= link_timeout)
        silent &= self.blocks >= BLOCKS
        for owner in known:
            away = now - self.since[owner] >= link_timeout
            silent[owner] |= away and self.steps[owner] >= KNOWN_STEPS
        return [int(owner) for owner in np.flatnonzero(silent)]


@dataclass(frozen=True, eq=False)
class _Span:
    """Elements of a tensor that travel after a step; all views are of one dimension."""

    own: Tensor  # in the tensor
    staged: Tensor  # in the staging memory, which the owner's values overwrite
    before: Tensor  # this rank's values when they were staged
    owner: int  # the rank whose values all take


class DriftBound:
    """Bound on the drift of replicas. Construct one on all ranks: ``DriftBound(model, optimizer)``.

    After each ``optimizer.step()``, 1/``period`` of the parameters' bytes (a slice) is sent. Before
    the next update, that slice gets the same values on all ranks. So ``period`` steps (a sweep)
    cover all parameters. Each rank owns an equal chunk of every slice, sends it to all others, and
    owns another chunk in the next sweep. Where a packet is lost, the rank keeps its own values
    until the next sweep. An element that was changed between the steps stays as it is.
    docs/guide.md has an example and the rules of use.

    To end it, use it as a context manager, or call :meth:`detach`.

    Args:
        model: Plain, wrapped by DistributedDataParallel, torch.compile or a framework, or sharded
            by fully_shard on a mesh with a replicated dimension (HSDP).
        optimizer: Optimizer of the model's parameters, or a wrapper that has it as ``optimizer``
            (accelerate's, Transformers', Lightning's) or ``optim`` (torchft's). Parameters that
            require gradients are synchronized. Later additions join at the next sweep.
        period: Number of slices, at least 1.
        group: The ranks that hold a replica, of any backend. None: DDP's, else the default group.
        max_missing: Maximum share of missing packets of slices. It also applies to gradients,
            unless the group was made with ``max_missing``, ``repair`` or ``fec``. None: 0.01,
            unless ``repair`` is given.
        repair: Rounds of selective resending of slices, 0 to 255. They also apply to gradients,
            unless the group was made with another number. None: none.
        state: Whether the optimizer's element-wise state (``exp_avg``, ...) is sent as well, for as
            many more bytes.

    Raises:
        OptionError: ``period``, ``max_missing`` or ``repair`` has a bad value.
        UnsupportedError: The model has no replicas, or a part of it can't be sent.
        MismatchError: Ranks hold parameters of other names, shapes or types.
        LinkError: A link delivers nothing of the data that ranks have to agree on.
            ``optimizer.step()`` raises it if no packet of an owner has arrived here for two sweeps,
            256 packets and the link timeout: the drift is then no longer bounded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        period: int = 16,
        *,
        group: dist.ProcessGroup | None = None,
        max_missing: float | None = None,
        repair: int | None = None,
        state: bool = False,
    ) -> None:
        if not is_whole(period, 1, 1 << 20):
            raise OptionError(f"period is {period!r}, wanted an integer, 1 to {1 << 20}")
        recovery = Recovery.of(max_missing, repair, exact=True)
        optimizer = steps_of(optimizer, "DriftBound")
        if isinstance(optimizer, ShardedOptimizer):
            raise UnsupportedError(
                "optimizer is a ShardedOptimizer, which sends the parameters after each step and "
                "keeps replicas together by itself (max_age says how closely); leave DriftBound "
                "out, or use it with DistributedDataParallel and a plain torch.optim.Optimizer"
            )
        self.period = period
        self.steps: int = 0
        """Steps of the optimizer seen."""
        self._model = model
        self._optimizer = optimizer
        self._wanted_group = group
        self._recovery = recovery
        self._state = state
        self._under_way: tuple[BlockGather, list[_Span]] | None = None
        """A gather, and the spans of it that other ranks own."""
        self._asked_for: BlockGather | None = None
        """The last gather, whose result is here. Others may still ask for what is staged."""
        self._lay_out()
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        self._warned: set[str] = set()
        self._undo: Callable[[], None] | None = None
        if self._collectives.lossy is not None:
            self._undo = self._collectives.lossy.lossy_recover(
                repair=recovery.repair, max_missing=recovery.max_missing
            )

    @property
    def bytes_per_step(self) -> int:
        """Bytes that one step synchronizes over all ranks."""
        return self._staging.numel()

    @torch.no_grad()
    def finish(self) -> None:
        """Take the values sent after the last step now instead of before the next update.

        It sends nothing, so ranks need not call it alike.

        Raises:
            LinkError: No packet of an owner has arrived here for too long.
            LossyError: The exchange has failed.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        gather, theirs = under_way
        arrived = gather.wait_result()
        self._asked_for = gather
        self._check_owners(arrived)
        if not theirs:
            return
        changed = sum(self._keep_own(span) for span in theirs)
        if 2 * changed > sum(span.own.numel() for span in theirs):
            self._warn_once(
                "%s: most of the parameters that DriftBound sent after step %d were changed before "
                "the next one, and stay as they are: replicas that are changed so at each step are "
                "not kept together; change parameters in a hook of "
                "optimizer.register_step_post_hook that is registered before DriftBound, or call "
                "its finish() first"
            )
        torch._foreach_copy_([span.own for span in theirs], [span.staged for span in theirs])

    def detach(self) -> None:
        """End the exchange. All ranks must call this at the same step. Idempotent.

        Values under way are taken. A failure of that exchange is only logged: the group's next call
        raises it.
        """
        self._end()
        try:
            self.finish()
        except LossyError as error:
            log.warning("what DriftBound has sent after step %d isn't taken: %s", self.steps, error)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> DriftBound:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.detach()
        else:  # what is under way may never come
            self._end()

    # ---- the slices ----

    def _lay_out(self) -> None:
        """Cuts what there is now into slices. All ranks do so at the same step."""
        holdings = stepped(self._model, self._optimizer, self._wanted_group)
        # An owner counts as heard when a block has come: in smaller packets few come whole.
        recovery = replace(self._recovery, whole_packets=True)
        self._collectives = Collectives(group_of(holdings), recovery=recovery)
        sources = sources_of(holdings, self._optimizer, state=self._state)
        tensors = [self._tensor(source) for source in sources]
        named = [(source.name, tensor) for source, tensor in zip(sources, tensors, strict=True)]
        device = device_of(named)
        check_same(
            [Agreement(self._collectives, [as_line(*pair) for pair in named], device)],
            PARAMETERS_DIFFER,
            "DriftBound needs the same model on all ranks, and the same optimizer",
        )
        self._laid_out = list(zip(sources, map(layout_of, tensors), strict=True))
        world = self._collectives.world
        sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors]
        self._slices = slice_up(sizes, self.period, world)
        self._staging = torch.empty(
            world * self._slices.chunk_bytes, dtype=torch.uint8, device=device
        )
        self._before = torch.empty_like(self._staging)
        self._silent = SilentOwners(self._collectives.rank, world, self.period)

    def _tensor(self, source: Source) -> Tensor:
        tensor = source.tensor(self._optimizer)
        assert tensor is not None, source.name
        return tensor

    def _changed(self, number: int) -> bool:
        """True if slice ``number`` differs from the layout. Additions are seen by the first one."""
        if number == 0:
            holdings = stepped(self._model, self._optimizer, self._wanted_group)
            sources = sources_of(holdings, self._optimizer, state=self._state)
            now = [source.identity for source in sources]
            if now != [source.identity for source, _ in self._laid_out]:
                return True
        touched = {piece.tensor for chunk in self._slices.of(number) for piece in chunk}
        for index in touched:
            source, layout = self._laid_out[index]
            tensor = source.tensor(self._optimizer)
            if tensor is None or layout_of(tensor) != layout:
                return True
        return False

    # ---- a step ----

    def _before_step(self, *_: Any) -> None:
        self.finish()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        sweep, number = divmod(self.steps, self.period)
        self.steps += 1
        if self._changed(number):
            self._lay_out()
        if self._collectives.world > 1 and not self._slices.empty(number):
            self._under_way = self._send(number, sweep)

    def _send(self, number: int, sweep: int) -> tuple[BlockGather, list[_Span]]:
        """Stages a slice, this rank's own values everywhere, and starts to gather it: what is lost
        leaves what was there."""
        asked_for, self._asked_for = self._asked_for, None
        if asked_for is not None:
            asked_for.wait()
        spans = self._spans(number, sweep)
        own = [span.own for span in spans]
        torch._foreach_copy_([span.staged for span in spans], own)
        torch._foreach_copy_([span.before for span in spans], own)
        gather = self._collectives.all_gather_blocks(self._staging)
        return gather, [span for span in spans if span.owner != self._collectives.rank]

    def _spans(self, number: int, sweep: int) -> list[_Span]:
        chunk_bytes = self._slices.chunk_bytes
        rows: dict[int, Tensor] = {}
        spans: list[_Span] = []
        for chunk, pieces in enumerate(self._slices.of(number)):
            owner = slice_owner(number, chunk, sweep, self._collectives.world)
            for piece in pieces:
                if piece.tensor not in rows:
                    tensor = self._tensor(self._laid_out[piece.tensor][0])
                    rows[piece.tensor] = in_memory_order(tensor)
                own = rows[piece.tensor][piece.begin : piece.end]
                begin = owner * chunk_bytes + piece.at
                end = begin + own.numel() * own.element_size()
                staged, before = (
                    memory[begin:end].view(own.dtype) for memory in (self._staging, self._before)
                )
                spans.append(_Span(own, staged, before, owner))
        return spans

    def _keep_own(self, span: _Span) -> int:
        """Stages own values for those that aren't finite or were changed; counts the latter."""
        finite = torch.isfinite(span.staged)
        same = (span.own == span.before) | torch.isnan(span.own)
        wanted = finite & same
        if bool(wanted.all()):
            return 0
        torch.where(wanted, span.staged, span.own, out=span.staged)
        if not bool(finite.all()):
            self._warn_once(
                "%s: a replica holds NaN or infinity, which DriftBound doesn't spread: the "
                "other ranks keep their own values (step %d); lower the learning rate, clip, or "
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with float16"
            )
        return int((~same).sum())

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, self._collectives, self.steps)

    def _check_owners(self, arrived: Mask) -> None:
        here, silent = self._collectives, self._silent
        if here.lossy is None:
            return
        now = time.monotonic()
        silent.note(arrived, now)
        if not silent.steps.any():
            return
        known = [peer.rank for peer in here.lossy.lossy_stats().peers if peer.link_is_dead]
        dead = silent.dead(now, here.lossy.lossy_options().link_timeout, known)
        for peer in sorted(set(dead).difference(here.known_lost())):
            raise LinkError(
                f"{here}: of {silent.blocks[peer]} packets of parameters that {here.peer(peer)} "
                f"sent in the last {silent.steps[peer]} steps (period {self.period}) none has come "
                f"for {now - silent.since[peer]:.3g} s, so DriftBound no longer keeps this replica "
                f"together with that one: that link is dead, or loses everything; repair it, or "
                f"restart without that rank from the last checkpoint",
                peer=peer,
            )

"""DriftBound: replicas that step by themselves, kept together by a slice of the parameters a step.

Under plain DDP with lossy gradients each replica steps with a slightly different mean, so their
squared distance grows with every step. Broadcasting parameters bounds it (Weintraub, Banner, Orda,
"Distributed Training under Packet Loss", arXiv 2507.07114, stage 2); here a little at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.errors import LinkError, OptionError, UnsupportedError
from lossycoll.options.fields import lossy, reliable
from lossycoll.train.common.arguments import is_whole
from lossycoll.train.common.collectives import named
from lossycoll.train.common.consistency import PARAMETERS_DIFFER, Meant, as_line, check_same
from lossycoll.train.common.replicas import Holding, holdings_of, in_memory_order, local
from lossycoll.train.common.staleness import MOST_REPAIR, REPAIR
from lossycoll.train.sharded.optimizer import ShardedOptimizer

from .silent_owners import Unheard
from .slices import Slices, owner, slice_up

log: Final = logging.getLogger("lossycoll")

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)


@dataclass(frozen=True, eq=False)
class _Source:
    """A parameter, or with ``key`` a tensor of its state."""

    name: str
    parameter: nn.Parameter
    key: str | None

    @property
    def identity(self) -> tuple[str, int]:
        return self.name, id(self.parameter)


class DriftBound:
    """Bounds the drift of replicas: ``DriftBound(model, optimizer)``, once, on all ranks.

    After each ``optimizer.step()`` 1/``period`` of the parameters' bytes is brought to one value on
    all ranks; after ``period`` steps all have been. Each rank owns, and sends to all others, an
    equal chunk of every slice, and another one in the next sweep, so no rank's replica is favoured
    and none sends more than others. A packet that is lost leaves a rank's own value until the next
    sweep.

    ``model``: plain, wrapped by DistributedDataParallel, or sharded by fully_shard on a mesh with
    a replicated dimension (HSDP), where copies of the same shard are kept together. ``optimizer``:
    steps parameters of the model; those of them that require gradients are looked after, also
    those that are added or unfrozen later, from the next sweep on. ``group``: the ranks that hold a
    replica; None is DDP's group, else the default group, of any backend.

    ``repair``: rounds of selective resending, 0 to 255, of slices and of all else that is lossy in
    this group: gradients, that is. A packet of a slice that a rank misses costs it a whole sweep,
    and what is missing of gradients makes them noisier, which DriftBound can't mend: two rounds are
    worth far more than their bytes (docs/theory.md, docs/quality.md). Where the group was made with
    ``repair`` written or set (``LOSSYCOLL_REPAIR``), that holds for gradients. With 255 nothing is
    missing in practice; in a block of ``lossycoll.reliable()``, or a group with
    ``delivery="reliable"``, nothing is. ``state``: whether the optimizer's element-wise state
    (``exp_avg``, ``momentum_buffer``, ...) is brought along, which takes that many more bytes; a
    shorter period is a better use for them, so it isn't by default.

    Only steps that are taken count, so all ranks must take the same: under
    ``torch.amp.GradScaler`` ranks may find infinities where others don't, when gradients are lossy,
    and one that skips a step that others take is a MismatchError on all of them at the next
    collective. ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device="cpu")`` makes
    all ranks skip alike.

    A value that isn't finite isn't taken over from its owner: a replica that has diverged doesn't
    bring down the others, and gets theirs where it has such values.

    Use it as a context, or call :meth:`detach`, to end it. Raises OptionError for a bad ``period``
    or ``repair``, UnsupportedError for what has no replicas or can't be sent, MismatchError where
    ranks hold parameters of other names, shapes or types, LinkError when a link delivers nothing of
    what ranks have to agree on. ``optimizer.step()`` raises LinkError when nothing of what a rank
    owns has come here for two sweeps (and 256 packets, and as long as a reliable call would wait
    for that link): that replica is no longer kept together with others.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        period: int = 16,
        *,
        group: dist.ProcessGroup | None = None,
        repair: int = REPAIR,
        state: bool = False,
    ) -> None:
        _check("period", period, 1, 1 << 20)
        _check("repair", repair, 0, MOST_REPAIR)
        if not isinstance(optimizer, Optimizer):
            raise UnsupportedError(
                f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer, "
                f"after whose steps parameters are exchanged"
            )
        if isinstance(optimizer, ShardedOptimizer):
            raise UnsupportedError(
                "optimizer is a ShardedOptimizer, which sends the parameters after each step and "
                "keeps replicas together by itself (max_age says how closely); leave DriftBound "
                "out, or use it with DistributedDataParallel and a plain torch.optim.Optimizer"
            )
        self.period = period
        self.steps = 0
        """Steps of the optimizer seen."""
        self._model = model
        self._optimizer = optimizer
        self._wanted_group = group
        self._repair = repair
        self._state = state
        self._lay_out()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._told = False
        """Whether a replica that isn't finite has been."""
        self._undo: Callable[[], None] | None = None
        if isinstance(self._group, LossyProcessGroup):
            self._undo = self._group.lossy_resend(repair)

    @property
    def bytes_per_step(self) -> int:
        """What one step brings to one value on all ranks."""
        return self._staging.numel()

    def detach(self) -> None:
        """Ends the exchange after steps, on all ranks at the same step. Idempotent."""
        self._hook.remove()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> DriftBound:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    # ---- what there is to exchange ----

    def _holdings(self) -> list[Holding]:
        """The model's parameters that the optimizer steps."""
        stepped = {id(p) for entry in self._optimizer.param_groups for p in entry["params"]}
        holdings = [
            holding
            for holding in holdings_of(self._model, self._wanted_group)
            if id(holding.parameter) in stepped and holding.parameter.requires_grad
        ]
        if not holdings:
            raise UnsupportedError(
                "the optimizer steps none of the model's parameters that require gradients; pass "
                "the optimizer that was made of this model's parameters"
            )
        return holdings

    def _sources(self, holdings: list[Holding]) -> list[_Source]:
        """The parameters, each followed by its state, where that is brought along."""
        sources = []
        for holding in holdings:
            sources.append(_Source(holding.name, holding.parameter, None))
            for key, value in sorted(self._optimizer.state.get(holding.parameter, {}).items()):
                if self._state and _is_elementwise(key, value, holding.parameter):
                    sources.append(_Source(f"{holding.name}, {key}", holding.parameter, key))
        return sources

    def _tensor(self, source: _Source) -> Tensor | None:
        """What is there now; None for state that isn't any more."""
        if source.key is None:
            return local(source.parameter)
        value = self._optimizer.state.get(source.parameter, {}).get(source.key)
        return local(value) if isinstance(value, Tensor) else None

    def _lay_out(self) -> None:
        """Cuts what there is now into slices. All ranks do so at the same step."""
        holdings = self._holdings()
        self._group = _group_of(holdings)
        self._world = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        sources = self._sources(holdings)
        tensors = {s.name: t for s in sources if (t := self._tensor(s)) is not None}
        device = _device_of(tensors)
        self._sources_now = sources
        self._described = [_described(tensor) for tensor in tensors.values()]
        lines = [as_line(name, tensor) for name, tensor in tensors.items()]
        check_same(
            [Meant(self._group, lines, device)],
            PARAMETERS_DIFFER,
            "DriftBound needs the same model on all ranks, and the same optimizer",
        )
        sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors.values()]
        self._slices: Slices = slice_up(sizes, self.period, self._world)
        self._staging = torch.empty(
            self._world * self._slices.chunk_bytes, dtype=torch.uint8, device=device
        )
        self._unheard = Unheard(self._rank, self._world, self.period)

    # ---- a step ----

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        sweep, number = divmod(self.steps, self.period)
        self.steps += 1
        if self._changed(number):
            self._lay_out()
        if self._world > 1 and not self._slices.empty(number):
            self._exchange(number, sweep)

    def _changed(self, number: int) -> bool:
        """Whether slice ``number`` isn't what was laid out. Additions are seen by the first one."""
        if number == 0:
            now = [source.identity for source in self._sources(self._holdings())]
            if now != [source.identity for source in self._sources_now]:
                return True
        touched = {piece.tensor for chunk in self._slices.of(number) for piece in chunk}
        for index in touched:
            tensor = self._tensor(self._sources_now[index])
            if tensor is None or _described(tensor) != self._described[index]:
                return True
        return False

    def _exchange(self, number: int, sweep: int) -> None:
        """Packs a slice, this rank's own values everywhere; gathers it; unpacks what came."""
        chunk_bytes, rank = self._slices.chunk_bytes, self._rank
        rows: dict[int, Tensor] = {}
        own: list[Tensor] = []
        staged: list[Tensor] = []
        came: list[bool] = []
        for chunk, pieces in enumerate(self._slices.of(number)):
            by = owner(number, chunk, sweep, self._world)
            for piece in pieces:
                if piece.tensor not in rows:
                    tensor = self._tensor(self._sources_now[piece.tensor])
                    assert tensor is not None
                    rows[piece.tensor] = in_memory_order(tensor)
                values = rows[piece.tensor][piece.begin : piece.end]
                begin = by * chunk_bytes + piece.at
                end = begin + values.numel() * values.element_size()
                own.append(values)
                staged.append(self._staging[begin:end].view(values.dtype))
                came.append(by != rank)
        torch._foreach_copy_(staged, own)
        self._gather()
        theirs = [
            pair for pair, others in zip(zip(own, staged, strict=True), came, strict=True) if others
        ]
        for to, of in theirs:
            self._keep_finite(to, of)
        torch._foreach_copy_([to for to, _ in theirs], [of for _, of in theirs])

    def _keep_finite(self, own: Tensor, came: Tensor) -> None:
        """What isn't finite in one replica shall not be in all: puts ``own`` in its place."""
        finite = torch.isfinite(came)
        if bool(finite.all()):
            return
        torch.where(finite, came, own, out=came)
        if not self._told:
            self._told = True
            log.warning(
                "rank %d/%d: a replica holds NaN or infinity, which DriftBound doesn't spread: the "
                "other ranks keep their own values (step %d); lower the learning rate, clip, or "
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with float16",
                self._rank,
                self._world,
                self.steps,
            )

    def _gather(self) -> None:
        """Each rank's row of the staging memory to all; what is lost leaves what was there."""
        group = self._group
        if not isinstance(group, LossyProcessGroup):
            mine = self._staging.view(self._world, -1)[self._rank]
            dist.all_gather_single(self._staging, mine, group=group)
            return
        options = group.lossy_options()
        how = lossy(lossy_min_bytes=0, repair=self._repair)
        with reliable() if options.delivery == "reliable" else how:
            arrived = group.all_gather_blocks(self._staging).arrived
        now = time.monotonic()
        self._unheard.note(arrived, now)
        for peer in self._unheard.dead(now, options.link_patience):
            if peer not in group.lossy_lost():
                raise self._dead_link(group, peer, now)

    def _dead_link(self, group: LossyProcessGroup, peer: int, now: float) -> LinkError:
        unheard = self._unheard
        return LinkError(
            f"rank {self._rank}/{self._world}: of {unheard.blocks[peer]} packets of parameters "
            f"that {named(group, peer)} sent in the last {unheard.steps[peer]} steps "
            f"(period {self.period}) none has come for {now - unheard.heard(peer):.3g} s, so "
            f"DriftBound no longer keeps this replica together with that one: that link is dead, "
            f"or loses everything; repair it, or restart without that rank from the last "
            f"checkpoint",
            peer=peer,
        )


def _check(name: str, value: object, low: int, high: int) -> None:
    if not is_whole(value, low, high):
        raise OptionError(f"{name} is {value!r}, wanted an integer, {low} to {high}")


def _is_elementwise(key: object, value: object, parameter: Tensor) -> bool:
    return (
        key != "step"
        and isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype in DTYPES
    )


def _group_of(holdings: list[Holding]) -> dist.ProcessGroup:
    """The one group that holds copies of all of them."""
    first = holdings[0]
    for holding in holdings:
        copies = [group for group in holding.copies if dist.get_world_size(group) > 1]
        if holding.rest and not copies:
            raise UnsupportedError(
                f"parameter {holding.name} is sharded and has no copies: nothing can drift, and "
                f"there is nothing to bound; DriftBound is for DDP, and for fully_shard on a mesh "
                f"with a replicated dimension (HSDP)"
            )
        if len(copies) > 1 or holding.copies != first.copies:
            raise UnsupportedError(
                f"parameters {first.name} and {holding.name} have copies in {len(first.copies)} "
                f"and {len(holding.copies)} groups, or in different ones, wanted one for all; "
                f"attach one DriftBound for each, with optimizers of their own"
            )
    larger = [group for group in first.copies if dist.get_world_size(group) > 1]
    return (larger or list(first.copies))[0]


def _device_of(tensors: dict[str, Tensor]) -> torch.device:
    """Theirs, all of which must be on one and of types that can be sent."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise UnsupportedError(
                f"{first_name} is on {first.device} and {name} on {tensor.device}, wanted all on "
                f"one device; give each its own optimizer and DriftBound"
            )
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"{name} is {tensor.layout} of {tensor.dtype}, wanted a dense tensor of "
                f"{', '.join(str(dtype) for dtype in DTYPES)}"
            )
        in_memory_order(tensor)
    return first.device


_Described = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def _described(tensor: Tensor) -> _Described:
    return tensor.dtype, tensor.shape, tensor.stride()

"""An optimizer whose state is sharded, and whose gradients and parameters may lose packets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import (
    CheckpointError,
    LinkError,
    NonFiniteError,
    OptionError,
    PeerLostError,
    TrainingError,
)
from . import checkpoint
from .admission import check_agreement, check_parameters, spec
from .ages import MAX_AGE, Ages, histogram
from .buckets import BUCKET_BYTES, plan
from .exchange import Exchange, Mask
from .probe import elementwise_state
from .reducer import Reducer, Status
from .shards import Piece, Shard


@dataclass(frozen=True, slots=True)
class ShardedFigures:
    """What :meth:`ShardedOptimizer.figures` returns: sums over all steps at this rank.

    ``steps`` that were taken, ``skipped`` because of NaN or infinity. ``blocks`` of parameters that
    other ranks sent here; of those ``stale`` ones didn't arrive, and left what was there, and
    ``repaired`` ones were asked for until they did.
    """

    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    stale: int = 0
    repaired: int = 0


class ShardedOptimizer(Optimizer):
    """Any element-wise optimizer, sharded over the ranks, over a network that loses packets."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        max_age: int | None = MAX_AGE,
        bucket_bytes: int = BUCKET_BYTES,
        on_nonfinite: str = "raise",
        **defaults: Any,
    ) -> None:
        _check_arguments(max_age, bucket_bytes, on_nonfinite)
        self._inner: Optimizer | None = None
        self._exchange = Exchange(group)
        self._class = optimizer_class
        self._options = dict(defaults)
        self._max_age = max_age
        self._bucket_bytes = bucket_bytes
        self._on_nonfinite = on_nonfinite
        self._model: list[Parameter] = []
        self._names: list[str] = []
        self._shards: list[Shard] = []
        self._ages: list[Ages] = []
        self._pieces: list[Piece] = []
        self._frozen: dict[Parameter, checkpoint.State] = {}
        """Parameters that are left out, with the state that a checkpoint had of them."""
        self._elementwise: frozenset[str] = frozenset()
        self._carrier: Parameter | None = None
        self._reduced: Status | None = None
        """Of the backward pass whose gradients the next step takes."""
        self._consolidated: dict[str, Any] | None = None
        self._figures = ShardedFigures()
        self._reducer = Reducer(self._exchange, lambda index: self._names[index], self._receive)
        super().__init__(params, {})
        self._groups = self.param_groups
        """As the caller gave them: the model's parameters, and the options that were written."""
        segments = self._take(self._groups, 0)
        inner = optimizer_class(
            [
                {**_options(entry), "params": pieces}
                for entry, pieces in zip(self._groups, segments, strict=True)
            ],
            **defaults,
        )
        self._inner = inner
        self.defaults = inner.defaults
        self._adopt()

    # ---- parameters ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, in buckets of their own. All ranks must call this alike, and not within
        a backward pass.

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
        thawed = {p for p in tensors if p in self._frozen and p.requires_grad}
        before = [list(entry["params"]) for entry in self._groups]
        for entry in self._groups:
            entry["params"] = [p for p in entry["params"] if p not in thawed]
        self.param_groups = self._groups
        try:
            super().add_param_group(added)
            number = len(self._groups) - 1
            pieces = self._take(self._groups[number:], number)[0]
        except BaseException:
            for entry, members in zip(self._groups, before, strict=False):
                entry["params"] = members
            del self._groups[len(before) :]
            raise
        finally:
            self.param_groups = self._inner.param_groups
        self._inner.add_param_group({**_options(added), "params": pieces})
        for piece in self._pieces:
            state = self._frozen.get(self._model[piece.index])
            if state:
                cut = checkpoint.cut(piece.segment, state, self._elementwise)
                self._inner.state[piece.parameter] = cut
        for parameter in thawed:
            del self._frozen[parameter]
        self._consolidated = self._reduced = None

    def _take(self, groups: Sequence[dict[str, Any]], number: int) -> list[list[Parameter]]:
        """Moves the parameters of new groups, the first of which is group ``number``, into buckets.

        Returns this rank's segments, by group.
        """
        model, names, specs, frozen = [], [], [], []
        for place, entry in enumerate(groups, number):
            told = entry.get("param_names")
            for position, parameter in enumerate(dict.fromkeys(entry["params"])):
                name = f"parameter {position} of group {place}"
                name = f"{told[position]!r} ({name})" if told else name
                if parameter.requires_grad:
                    model.append(parameter)
                    names.append(name)
                    specs.append(spec(parameter, place))
                else:
                    frozen.append(parameter)
        check_parameters(self._exchange, model, names)
        for entry in groups:
            options = {**self._options, **_options(entry)}
            self._elementwise |= elementwise_state(self._class, options, str(self._exchange))
        settings = {
            "optimizer": getattr(self._class, "__name__", ""),
            "max_age": self._max_age,
            "bucket_bytes": self._bucket_bytes,
            "on_nonfinite": self._on_nonfinite,
        }
        check_agreement(self._exchange, settings, specs, names)
        start, rank = len(self._model), self._exchange.rank
        self._model += model
        self._names += names
        self._frozen |= {parameter: {} for parameter in frozen}
        buckets = plan(specs, self._exchange.world, self._bucket_bytes, start=start)
        shards = [Shard(bucket, self._model, rank) for bucket in buckets]
        for shard in shards:
            self._exchange.broadcast(shard.flat)
            blocks = self._exchange.blocks(shard.bucket.chunk * shard.flat.element_size())
            self._ages.append(Ages(rank, self._exchange.world, blocks, self._max_age))
        self._shards += shards
        self._reducer.watch(model, shards)
        pieces = [piece for shard in shards for piece in shard.pieces]
        self._pieces += pieces
        out: list[list[Parameter]] = [[] for _ in groups]
        by_index = sorted(pieces, key=lambda piece: piece.index)
        for piece in by_index:
            place = specs[piece.index - start].key[0]  # type: ignore[index]
            out[place - number].append(piece.parameter)
        return out

    def _adopt(self) -> None:
        """What schedulers, scalers and users see is the inner optimizer's own."""
        assert self._inner is not None
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    # ---- gradients ----

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block whose backward passes add to ``grad`` and send nothing, as DDP's."""
        return self._reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters, and those of this rank's segments."""
        for parameter in (*self._model, *self._frozen):
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()
        self._reducer.abandon()
        self._reducer.forget()
        self._reduced = None
        self._drop_carrier()
        for piece in self._pieces:
            piece.parameter.grad = None

    def _receive(self, status: Status) -> None:
        """A backward pass has been reduced: hands the segments their gradients."""
        self._reduced = status
        self._drop_carrier()
        used = status.used
        for piece in self._pieces:
            piece.parameter.grad = piece.grad if used[piece.index] else None
        held = [piece.grad for piece in self._pieces if used[piece.index]]
        if any(used) and not held:
            held = [self._lend_carrier()]
        if status.bad:
            # A GradScaler looks at this rank's gradients only, and all must skip this step.
            for grad in held:
                grad.fill_(math.inf)

    def _lend_carrier(self) -> Tensor:
        """A parameter of no meaning for a rank that has no gradient, as a GradScaler wants one."""
        like = self._model[0]
        self._carrier = Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        self._carrier.grad = torch.zeros_like(self._carrier)
        self.param_groups[0]["params"].append(self._carrier)
        return self._carrier.grad

    def _drop_carrier(self) -> None:
        if self._carrier is not None:
            members = self.param_groups[0]["params"]
            members[:] = [member for member in members if member is not self._carrier]
            self._carrier = None

    def _reduce(self) -> Status:
        """The status of the gradients as they are; reduces them if no backward pass has."""
        if self._reduced is None:
            self._reducer.finish()
        else:
            index = self._reducer.changed()
            if index is not None:
                raise TrainingError(
                    f"{self._exchange}: the gradient of {self._names[index]} was changed after "
                    f"the backward pass had sent it, which has no effect; clip by "
                    f"optimizer.clip_grad_norm_(max_norm), change the gradients of "
                    f"optimizer.param_groups instead, or change them within the backward pass"
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
        self._reduce()
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
        device = self._model[0].device if self._model else torch.device("cpu")
        local = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1)
        if math.isinf(norm_type):
            total = local.max().to(torch.float64)
            self._exchange.combine(total, dist.ReduceOp.MAX).wait()
        else:
            total = local.to(torch.float64).pow(norm_type).sum()
            self._exchange.combine(total, dist.ReduceOp.SUM).wait()
            total = total.pow(1.0 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return total

    # ---- a step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps this rank's segments, and sends them to all. All ranks must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        self._check_sound()
        bad = self._reduce().bad
        self._drop_carrier()
        if bad:
            self._refuse(bad)
            return loss
        self._reduced = self._consolidated = None
        self._inner.step()
        self._figures = replace(self._figures, steps=self._figures.steps + 1)
        self._spread()
        return loss

    def _refuse(self, bad: Sequence[int]) -> None:
        """The gradients of ranks ``bad`` are not numbers."""
        if self._on_nonfinite == "skip":
            self._reduced = None
            self._figures = replace(self._figures, skipped=self._figures.skipped + 1)
            return
        who = ", ".join(self._exchange.peer(rank) for rank in bad)
        raise NonFiniteError(
            f"{self._exchange}: the gradient of {who} holds NaN or infinity, and no rank took a "
            f"step; lower the learning rate or clip, use a torch.amp.GradScaler with float16, "
            f"or skip such steps by on_nonfinite='skip'",
            bad,
        )

    def _spread(self) -> None:
        """Sends every chunk to all ranks; what doesn't arrive stays as it was, and ages."""
        asked = [ages.needed() for ages in self._ages]
        pairs = zip(self._shards, asked, strict=True)
        works = [self._exchange.gather(shard.flat, needed) for shard, needed in pairs]
        masks = [work.wait() for work in works]
        torch.autograd.graph.increment_version(self._model)
        dead: LinkError | None = None
        for ages, needed, arrived in zip(self._ages, asked, masks, strict=True):
            if needed is not None and (needed & ~arrived).any():
                dead = dead or self._dead_link(ages, needed & ~arrived)
            self._count(ages, needed, arrived)
            ages.advance(arrived)
        if dead is not None:
            raise dead

    def _count(self, ages: Ages, needed: Mask | None, arrived: Mask) -> None:
        sent = ages.values.size - ages.values.shape[1]
        repaired = 0 if needed is None else int((needed & arrived).sum())
        self._figures = replace(
            self._figures,
            blocks=self._figures.blocks + sent,
            stale=self._figures.stale + int((~arrived).sum()),
            repaired=self._figures.repaired + repaired,
        )

    def _dead_link(self, ages: Ages, missing: Mask) -> LinkError:
        owner = int(missing.any(axis=1).argmax())
        block = int(missing[owner].argmax())
        age = int(ages.values[owner, block]) + 1
        return LinkError(
            f"{self._exchange}: parameters of {self._exchange.peer(owner)} haven't come for {age} "
            f"steps, wanted at most {self._max_age} (max_age), and asking for them again had no "
            f"answer: the link from there is dead or loses everything; repair it, or restart "
            f"without that rank from the last checkpoint",
            peer=owner,
        )

    def _check_sound(self) -> None:
        """Raises if a step would be wrong."""
        lost = self._exchange.lost()
        if lost:
            who = ", ".join(self._exchange.peer(rank) for rank in lost)
            raise PeerLostError(
                f"{self._exchange}: lost {who}, which had the only copy of its share of the "
                f"optimizer's state; restart with the ranks that are left, from the last "
                f"checkpoint (load_state_dict takes it at any number of ranks)",
                peer=lost[0],
            )
        for shard in self._shards:
            for position, slot in enumerate(shard.bucket.slots):
                if self._model[slot.index].data_ptr() != shard.address(position) and slot.shape:
                    raise TrainingError(
                        f"{self._exchange}: {self._names[slot.index]} was given other memory after "
                        f"the optimizer was made (model.to(), parameter.data = ..., "
                        f"load_state_dict(assign=True)); do that before, or make the optimizer anew"
                    )
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise TrainingError(
                    f"{self._exchange}: a parameter of shape {tuple(parameter.shape)} that was "
                    f"frozen (requires_grad=False) when the optimizer was made has a gradient; "
                    f"call optimizer.add_param_group({{'params': [parameter]}}) on all ranks when "
                    f"it is to be trained"
                )

    # ---- replicas and figures ----

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Makes all replicas equal, bit for bit: every rank gets all owners' parameters, reliably.

        All ranks must call this.
        """
        works = [self._exchange.copy(shard.flat) for shard in self._shards]
        for work in works:
            if work is not None:
                work.wait()
        torch.autograd.graph.increment_version(self._model)
        for ages in self._ages:
            ages.reset()

    def ages(self) -> tuple[int, ...]:
        """How many blocks of other ranks' parameters are 0, 1, 2, ... steps old here."""
        return histogram(self._ages, self._exchange.rank)

    def figures(self) -> ShardedFigures:
        """What has happened at this rank since the optimizer was made."""
        return self._figures

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
        state: dict[Parameter, checkpoint.State] = {}
        for shard in self._shards:
            mine = [
                checkpoint.part(piece.segment, held, self._elementwise)
                for piece in shard.pieces
                if (held := self._inner.state.get(piece.parameter))
            ]
            told = self._exchange.tell(mine, to)
            for slot in shard.bucket.slots if told is not None else ():
                parts = [part for parts in told or () for part in parts if part.index == slot.index]
                if parts:
                    state[self._model[slot.index]] = checkpoint.joined(slot, parts)
        if self._exchange.rank == to:
            state |= {parameter: held for parameter, held in self._frozen.items() if held}
            ids = self._ids()
            self._consolidated = {
                "state": {ids[p]: state[p] for p in sorted(state, key=ids.__getitem__)},
                "param_groups": self._packed_groups(ids),
            }

    def _ids(self) -> dict[Parameter, int]:
        """The numbers by which a plain optimizer's state_dict calls the same parameters."""
        out: dict[Parameter, int] = {}
        start = 0
        for entry in self._groups:
            for place, parameter in enumerate(entry["params"], start):
                out.setdefault(parameter, place)
            start += len(entry["params"])
        return out

    def _packed_groups(self, ids: dict[Parameter, int]) -> list[dict[str, Any]]:
        out = []
        for mine, given in zip(self.param_groups, self._groups, strict=True):
            packed = {key: value for key, value in mine.items() if key != "params"}
            if "param_names" in given:
                packed["param_names"] = given["param_names"]
            out.append({**packed, "params": [ids[p] for p in given["params"]]})
        return out

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
        saved = state_dict["param_groups"]
        counts = [len(entry["params"]) for entry in self._groups]
        checkpoint.check_groups(saved, counts, str(self._exchange))
        members = (p for entry in self._groups for p in entry["params"])
        numbers = (number for entry in saved for number in entry["params"])
        states = {
            parameter: state_dict["state"][number]
            for parameter, number in zip(members, numbers, strict=True)
            if number in state_dict["state"]
        }
        self._check_shapes(states)
        self._drop_carrier()
        pieces = {id(piece.parameter): piece for piece in self._pieces}
        local: dict[int, checkpoint.State] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for mine, other in zip(self.param_groups, saved, strict=True):
            numbered = list(enumerate(mine["params"], count))
            count += len(numbered)
            for number, segment in numbered:
                piece = pieces[id(segment)]
                held = states.get(self._model[piece.index])
                if held is not None:
                    local[number] = checkpoint.cut(piece.segment, held, self._elementwise)
            groups.append({**_options(other), "params": [number for number, _ in numbered]})
        self._inner.load_state_dict({"state": local, "param_groups": groups})
        self._frozen = {p: dict(states.get(p, {})) for p in self._frozen}
        self._adopt()
        self._consolidated = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_shapes(self, states: dict[Parameter, checkpoint.State]) -> None:
        """On every rank alike, whatever it owns."""
        for parameter, name in zip(self._model, self._names, strict=True):
            checkpoint.check_state(
                states.get(parameter, {}), tuple(parameter.shape), self._elementwise, name
            )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says besides its members."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_arguments(max_age: object, bucket_bytes: object, on_nonfinite: object) -> None:
    whole = isinstance(max_age, int) and not isinstance(max_age, bool) and max_age >= 0
    if max_age is not None and not whole:
        raise OptionError(f"max_age is {max_age!r}, wanted a number of steps from 0 on, or None")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise OptionError(f"bucket_bytes is {bucket_bytes!r}, wanted a number of bytes from 1 on")
    if on_nonfinite not in ("raise", "skip"):
        raise OptionError(f"on_nonfinite is {on_nonfinite!r}, wanted 'raise' or 'skip'")

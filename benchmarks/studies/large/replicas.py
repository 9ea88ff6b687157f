"""Replicas of one model that train in turn on one device, by one of the methods.

Each has its parameters and gradients in a flat tensor of its own, cut into buckets. Gradients,
slices and parameters travel through an :class:`.exchange.Exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lossycoll.train.drift.slices import slice_owner

from .exchange import Exchange

RELIABLE: Final = "reliable"
METHODS: Final = (RELIABLE, "ddp", "ddp+driftbound", "sharded")
GRAIN: Final = 16
"""Elements of which all borders are multiples."""
PERIOD: Final = 16
"""DriftBound's: slices of a sweep."""

OptimizerOf = Callable[[Sequence[Parameter]], torch.optim.Optimizer]


class Replicas:
    """``world`` equal replicas of what ``make`` returns. ``method`` is one of METHODS."""

    def __init__(
        self,
        method: str,
        make: Callable[[], nn.Module],
        optimizer_of: OptimizerOf,
        exchange: Exchange,
        bucket_elements: int,
        device: torch.device,
    ) -> None:
        self.method, self.exchange = method, exchange
        self.world = exchange.world
        first = make().to(device)
        self.models = [first, *(make().to(device) for _ in range(self.world - 1))]
        self.parameters = sum(parameter.numel() for parameter in first.parameters())
        unit = self.world * GRAIN
        bucket = -(-bucket_elements // unit) * unit
        size = -(-self.parameters // unit) * unit
        self.buckets = [(at, min(at + bucket, size)) for at in range(0, size, bucket)]
        self.counts = self._counts()
        self.flats = [torch.zeros(size, device=device) for _ in self.models]
        self.grads = [torch.zeros(size, device=device) for _ in self.models]
        values = [parameter.detach().clone() for parameter in first.parameters()]
        for model, flat, grads in zip(self.models, self.flats, self.grads, strict=True):
            at = 0
            # As buckets fill: the backward pass ends with the first parameters.
            for parameter, value in reversed(list(zip(model.parameters(), values, strict=True))):
                part, shape = slice(at, at + value.numel()), value.shape
                flat[part].view(shape).copy_(value)
                parameter.data, parameter.grad = flat[part].view(shape), grads[part].view(shape)
                at += value.numel()
        self._own = [self._owned(rank) for rank in range(self.world)]
        self.optimizers = [optimizer_of(own) for own in self._own]
        self.steps = 0
        self._staged: list[Tensor] = []
        """By replica, what has come of the last slice, by owner."""
        self._places: list[tuple[slice, int]] = []
        """Where a part of the slice is in a replica, and in what is staged."""

    def _counts(self) -> list[list[int]]:
        """Elements of each bucket that each rank owns. Few ranks own a short one, and the next
        ones the next."""
        found, first = [], 0
        for begin, end in self.buckets:
            owners = self.exchange.owners(end - begin)
            ranks = sorted((first + i) % self.world for i in range(owners))
            grains = (end - begin) // GRAIN
            counts = [0] * self.world
            for number, rank in enumerate(ranks):
                counts[rank] = GRAIN * (grains // owners + (number < grains % owners))
            found.append(counts)
            first = (first + owners) % self.world
        return found

    def _owned(self, rank: int) -> list[Parameter]:
        """What a replica's optimizer steps: all of it, or its chunk of each bucket."""
        flat, grads = self.flats[rank], self.grads[rank]
        if self.method != "sharded":
            whole = Parameter(flat)
            whole.grad = grads
            return [whole]
        owned = []
        for (begin, end), counts in zip(self.buckets, self.counts, strict=True):
            own = Parameter(torch.split(flat[begin:end], counts)[rank])
            own.grad = torch.zeros_like(own)
            owned.append(own)
        return owned

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Exchanges the gradients that the backward passes have left, and steps with them."""
        if self.method == "sharded":
            self._reduce_owned()
        else:
            for begin, end in self.buckets:
                self.exchange.all_reduce([grads[begin:end] for grads in self.grads])
            self._take_slices()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if self.method == "sharded":
            for (begin, end), counts in zip(self.buckets, self.counts, strict=True):
                self.exchange.all_gather(
                    [flat[begin:end] for flat in self.flats], counts, finer=True
                )
        elif self.method == "ddp+driftbound":
            self._send_slices()
        for grads in self.grads:
            grads.zero_()
        self.steps += 1

    def _reduce_owned(self) -> None:
        for number, (begin, end) in enumerate(self.buckets):
            outputs = [own[number].grad for own in self._own]
            assert all(out is not None for out in outputs)
            inputs = [grads[begin:end] for grads in self.grads]
            self.exchange.reduce_scatter(inputs, outputs)  # type: ignore[arg-type]

    def _send_slices(self) -> None:
        """What DriftBound sends after a step: a part of the parameters, whose owners rotate."""
        sweep, number = divmod(self.steps, PERIOD)
        size = len(self.flats[0])
        chunk = -(-size // (PERIOD * self.world * GRAIN)) * GRAIN
        begin = min(number * self.world * chunk, size)
        end = min(begin + self.world * chunk, size)
        places = [slice(at, min(at + chunk, end)) for at in range(begin, end, chunk)]
        # By owner, as they are staged: an owner's chunk is padded, never absent.
        owners = [slice_owner(number, at, sweep, self.world) for at in range(len(places))]
        staged = []
        for flat in self.flats:
            room = torch.zeros(self.world * chunk, device=flat.device)
            for place, owner in zip(places, owners, strict=True):
                room[owner * chunk :][: place.stop - place.start] = flat[place]
            staged.append(room)
        self.exchange.all_gather(staged, [chunk] * self.world)
        self._staged = staged
        self._places = [(place, owner * chunk) for place, owner in zip(places, owners, strict=True)]

    def _take_slices(self) -> None:
        """Before the next update."""
        for flat, room in zip(self.flats, self._staged, strict=False):
            for place, at in self._places:
                flat[place] = room[at : at + place.stop - place.start]
        self._staged = []

    @torch.no_grad()
    def drift(self) -> float:
        """RMS distance between two replicas, relative to the norm of their mean."""
        average = torch.zeros_like(self.flats[0])
        for flat in self.flats:
            average += flat / self.world
        squares = sum(float((flat - average).square().sum()) for flat in self.flats)
        return float((2 * squares / (self.world - 1)) ** 0.5 / average.norm())

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs to go on with."""
        return {
            "flats": self.flats,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "staged": self._staged,
            "places": self._places,
            "steps": self.steps,
            "op": self.exchange.op,
            "traffic": self.exchange.traffic,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        for flat, saved in zip(self.flats, state["flats"], strict=True):
            flat.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._staged, self._places = state["staged"], state["places"]
        self.steps, self.exchange.op = state["steps"], state["op"]
        self.exchange.traffic = state["traffic"]

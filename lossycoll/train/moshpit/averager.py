"""Tensors that a swarm's peers average, in groups that change with each round.

Source: Ryabinin et al., "Moshpit SGD: Communication-Efficient Decentralized Training on
Heterogeneous Unreliable Devices", NeurIPS 2021; of fragments Douillard et al., "Streaming DiLoCo
with overlapping communication", 2025.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lossycoll.devices.registry import is_served
from lossycoll.devices.staging import Staging
from lossycoll.errors import OperationTimeout, OptionError, UnsupportedError
from lossycoll.options.fields import Options
from lossycoll.plan.codec import Floats
from lossycoll.plan.grid import Grid
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.swarm.member import NO_ROUND, RoundReport
from lossycoll.runtime.swarm.protocol import AVERAGE, SHAPES, TENSORS, digest_of, text_of
from lossycoll.runtime.swarm.state_transfer import Snapshot, TransferredState
from lossycoll.runtime.swarm.swarm import Swarm
from lossycoll.train.common.models import is_dtensor, local

MOST_NORM: Final = 1e6
MOST_SECONDS: Final = 1e6
NOT_FINITE: Final = "values of this peer aren't finite"
MOST_FRAGMENTS: Final = 64
TURNS: Final = 2
"""After so many sweeps fragments come one round earlier: else each would meet but some of a grid's
axes."""
log: Final = logging.getLogger("lossycoll")


class Fragments:
    """``count`` shares of the rows of all tensors, of which a round averages one. A row is what one
    index of the first dimension has; of a vector, a value. In the source a fragment is some layers;
    rows, as ARC-Top-K sends them, make all of the same size. All peers of a round know its number
    and so its rows: no index travels, sums stay sums, and a lost packet costs its weight alone."""

    def __init__(self, count: int) -> None:
        if type(count) is not int or not 1 <= count <= MOST_FRAGMENTS:
            raise OptionError(f"fragments is {count!r}, wanted 1 to {MOST_FRAGMENTS}")
        self.count = count

    def of(self, number: int) -> int:
        return (number + number // (TURNS * self.count)) % self.count

    def rows(self, tensors: Sequence[Tensor], fragment: int) -> list[Tensor]:
        """Views of the fragment's rows, one for each tensor. Those of a tensor may be none."""
        return [
            (one.view(1) if one.dim() == 0 else one)[(fragment + at) % self.count :: self.count]
            for at, one in enumerate(tensors)
        ]

    def gather(self, tensors: Sequence[Tensor], fragment: int) -> Floats:
        found = torch.cat([one.reshape(-1) for one in self.rows(tensors, fragment)])
        values: Floats = found.numpy().astype(np.float32, copy=False)
        return values

    def scatter(self, values: Floats, tensors: Sequence[Tensor], fragment: int) -> None:
        """Writes the fragment's values to where :meth:`gather` had them from."""
        flat, begin = torch.from_numpy(values), 0
        for view in self.rows(tensors, fragment):
            view.copy_(flat[begin : begin + view.numel()].view(view.shape))
            begin += view.numel()


WHOLE: Final = Fragments(1)


class MoshpitAverager:
    """Averager of tensors with the peers of a swarm, a group at a time.

    After as many rounds as the grid has axes, all peers have the mean of all, if no peer fails and
    no cell is empty. Otherwise they approach it (docs/moshpit.md).

    Args:
        swarm: Swarm whose peers have tensors of the same shapes, in the same order.
        tensors: Dense tensors of float32, float16 or bfloat16, all on the CPU or all on one GPU: a
            model's parameters, for example. Means are taken in float32, on the CPU. Parameters that
            are frozen (``requires_grad=False``) are left out. A module stands for its parameters
            and floating-point buffers. DTensors (``fully_shard``) stand for this rank's shards.
        grid: Length of each axis, which bounds the size of groups. Empty: it follows the number
            of peers.
        max_missing: Maximum share of missing packets in a round: the option of this name, unless
            the swarm's options set it, ``repair`` or ``fec``. None: lost packets stay lost.
        wire: Encoding of values in packets: the option of this name, as in ``"int8"`` or
            ``"int4/int8"``, unless the swarm's options set it. None: the swarm's options count.
            With few bits, bf16 or fp16, later rounds make up for a value's rounding error
            (docs/swarm-reference.md).
        max_norm: Limit on the movement of contributions and means in a round, as a multiple of the
            typical one, such as 3. Values beyond it are rejected (docs/swarm-reference.md). None:
            no limit. Not with ``wire``.

    Raises:
        OptionError: There are no tensors, or ``grid``, ``max_missing``, ``wire`` or ``max_norm`` is
            invalid.
        UnsupportedError: A tensor has another type or layout, or not all are on the CPU or on one
            GPU.
        RendezvousError: Other peers have other tensors, or another ``wire``.
        OperationTimeout: The directory doesn't answer.
    """

    def __init__(
        self,
        swarm: Swarm,
        tensors: Iterable[Tensor] | nn.Module,
        grid: Sequence[int] = (),
        *,
        max_missing: float | None = None,
        wire: str | None = None,
        max_norm: float | None = None,
    ) -> None:
        wanted = self._averaged = averaged(tensors)
        if not wanted:
            raise OptionError("there are no tensors to average")
        parts = self._tensors
        for tensor in parts:
            if (
                tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16)
                or tensor.layout != torch.strided
                or not (tensor.is_cpu or is_served(tensor))
                or tensor.device != parts[0].device
            ):
                raise UnsupportedError(
                    f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}; wanted dense "
                    f"ones of float32, float16 or bfloat16, all on the CPU or all on one GPU (the "
                    f"first one is on {parts[0].device})"
                )
        try:
            shape = str(Grid(tuple(map(index, grid)))) if grid else ""
        except (ValueError, TypeError) as error:
            raise OptionError(f"grid is {grid!r}: {error}") from None
        if max_missing is not None:
            Options(max_missing=max_missing)  # which checks it
        if wire is not None:
            Options(wire=wire)
        if max_norm is not None and not 1 < max_norm < MOST_NORM:
            raise OptionError(f"max_norm is {max_norm}, wanted above 1 and below {MOST_NORM:g}")
        self._name, self._member = swarm.name, swarm.member
        self._settings = _settings(wanted, shape, max_missing, max_norm)
        self._is_settled = self._is_sick = False
        said = text_of(self._settings)
        self._member.averages(
            digest_of(said),
            shape,
            max_missing=max_missing,
            wire=wire,
            settings=said,
            draft=True,
            max_norm=max_norm or 0.0,
        )
        self._kinds = list(map(_kind, parts))
        self._staging = Staging(parts)
        self._values, self._parts = self._staging.values, self._staging.parts
        self._reference: Floats | None = None
        """Values at the end of the latest round in which each was finite, with ``max_norm``: else
        nobody could tell how far the means have moved that heal it."""
        if max_norm is not None:
            with torch.no_grad():
                self._staging.fill(parts)
            self._reference = self._values.copy()

    def settle(
        self, settings: Mapping[str, object], target: int = 0, *, timeout: float = 10.0
    ) -> None:
        """Declare the settings of the training, which must be the same on all peers.

        Args:
            settings: Names and values, without commas or equals signs.
            target: Samples of all peers after which a round is due; 0: whenever peers are ready.
            timeout: Seconds.

        Raises:
            RendezvousError: Other peers have other settings.
            OperationTimeout: The directory doesn't answer.
        """
        said = text_of({**self._settings, **settings})
        self._member.settle(digest_of(said), said, target, timeout)
        self._is_settled = True

    def wait_for(self, peers: int, timeout: float = 30.0) -> None:
        """Wait until ``peers`` peers have the same tensors and settings.

        Args:
            peers: Number of peers, this one included.
            timeout: Seconds.

        Raises:
            RendezvousError: There are fewer after ``timeout``.
            OperationTimeout: The directory doesn't answer.
        """
        self._member.wait_for(peers, check_seconds(timeout))

    def progress(self, samples: int, since: int, *, claims: bool = False) -> None:
        """Report the progress of this peer's training.

        Args:
            samples: The swarm's samples, as of this peer's latest round or the state that it
                received.
            since: This peer's own samples since then.
            claims: Whether this peer's state comes from a checkpoint; if it is the newest, other
                peers take it.
        """
        self._member.progress(samples, since, claims=claims)

    @property
    def _tensors(self) -> list[Tensor]:
        """This rank's parts, as they are now: whoever moves a model gives its parameters others."""
        return [local(tensor) for tensor in self._averaged]

    @property
    def is_due(self) -> bool:
        """True if all peers together have seen ``target`` samples since a round was last due, or if
        this peer can't take part any more."""
        return self._member.client.due

    @property
    def peers(self) -> int:
        """Number of the swarm's peers by the directory's last message; 0: none has come yet."""
        return self._member.client.peers

    def step(self, weight: float = 1.0, timeout: float = 60.0) -> RoundReport:
        """Replace the tensors by their mean over the peers of one group, in place.

        A peer that dies meanwhile, or a lost packet, costs its share of the mean. Values without a
        mean stay as they were; ``report.kept`` is their share. With ``report.failure``, all do.

        Args:
            weight: Weight of this peer's tensors, 0 to 1e6: its number of samples, for example.
            timeout: Seconds for the whole of it.

        Returns:
            The round's report. If none began within ``timeout``, ``failure`` says why. Tensors with
            values that aren't finite don't count (``left_out``), and become the mean of the others.

        Raises:
            OptionError: The weight or the timeout can't be.
            RendezvousError: The directory refuses this peer.
        """
        tensors = self._tensors
        self.check(tensors)
        return self.step_on(tensors, weight, timeout)

    def step_on(
        self,
        tensors: Sequence[Tensor],
        weight: float = 1.0,
        timeout: float = 60.0,
        *,
        increments: int = 0,
        fragments: Fragments | None = None,
        after: Any = None,
    ) -> RoundReport:
        """Average other tensors of the same shapes and types, such as gradients.

        All peers of a round must pass tensors of the same meaning.

        Args:
            tensors: Dense tensors on the same device; they become the means.
            weight: As for :meth:`step`.
            timeout: Seconds for the whole of it.
            increments: Number of leading tensors that ``max_norm`` measures from 0, as gradients.
            fragments: Parts of the values; the round's number selects the one that is averaged.
                None: all values are.
            after: Result of :meth:`mark`, if another thread made the tensors.

        Returns:
            The round's report.

        Raises:
            OptionError: The weight or the timeout can't be.
            RendezvousError: The directory refuses this peer.
        """
        weight, timeout = check_weight(weight), check_seconds(timeout)
        with torch.no_grad():
            self._staging.fill(tensors, after)
            sick = self._find_sick()
            counts, reference = 0.0 if sick else weight, self._reference
            if reference is not None:
                reference[: sum(part.numel() for part in self._parts[:increments])] = 0.0
            parts = fragments or WHOLE
            chosen: tuple[int, Floats] | None = None

            def choose(number: int) -> tuple[int, Floats]:
                nonlocal chosen
                fragment = parts.of(number)
                chosen = fragment, parts.gather(self._parts, fragment)
                return chosen

            values = self._values if parts.count == 1 else choose
            try:
                if not self._is_settled:
                    self.settle({AVERAGE: TENSORS}, timeout=timeout)
                report = self._member.average(values, counts, timeout, reference)
            except OperationTimeout as error:
                how = NO_ROUND, (), (), 0.0, 1.0, timeout, 0.0, str(error)
                return RoundReport(*how, left_out=sick)
            if chosen is not None:
                parts.scatter(chosen[1], self._parts, chosen[0])
            self._staging.spill(tensors)
            if reference is not None and report.kept < 1:
                np.copyto(reference, self._values, where=np.isfinite(self._values))
        return self._member.show(replace(report, left_out=sick)) if sick else report

    def mark(self) -> Any:
        """Return an event in this thread's device stream, for another thread's :meth:`step_on`.

        Returns:
            An event; None on the CPU.
        """
        return self._staging.mark()

    def _find_sick(self) -> str:
        """Why the values may not count; "": they may. Said once until they are finite again."""
        sick = "" if bool(np.isfinite(self._values).all()) else NOT_FINITE
        if sick and not self._is_sick:
            log.warning("%s: they don't count, and become the mean of the others'", sick)
        self._is_sick = bool(sick)
        return sick

    def offer(self, state: Callable[[], Snapshot]) -> None:
        """Offer this peer's state to newcomers.

        Args:
            state: Function that returns this peer's state. A thread calls it when a newcomer asks.
        """
        self._member.offers(state)

    def fetch_state(
        self, own: Snapshot | None, donors: int, most: int, timeout: float = 10.0
    ) -> TransferredState | None:
        """Take the state of other peers.

        Args:
            own: This peer's state so far; None: it has none.
            donors: Maximum number of peers that send the state at once.
            most: Maximum size of a state in bytes.
            timeout: Seconds for all of it.

        Returns:
            The state of one of those peers, or ``own`` if that is as new; None: no peer has one.

        Raises:
            OperationTimeout: The directory doesn't answer, or the state doesn't come in time.
            LossyError: No donor has all of the state, or all donors have gone.
        """
        return self._member.fetch_state(own, donors, most, timeout)

    def memory(self) -> dict[int, Tensor]:
        """Return the rounding error of this peer's values that later rounds haven't made up for.

        Returns:
            Copies, by the fragment's number, which is 0 without fragments.
        """
        return {
            part: torch.from_numpy(one.copy()) for part, one in self._member.means.memory.items()
        }

    def remember(self, memory: Mapping[int, Tensor]) -> None:
        """Restore rounding errors that :meth:`memory` returned at this peer.

        Args:
            memory: The copies; those of other values are ignored.
        """
        taken = {part: one.numpy().astype(np.float32) for part, one in memory.items()}
        self._member.means.memory.clear()
        self._member.means.memory.update(taken)

    @property
    def name(self) -> str:
        """Name of this peer."""
        return self._name

    @property
    def bounds(self) -> bool:
        """True if ``max_norm`` is set."""
        return self._reference is not None

    @property
    def count(self) -> int:
        """Number of tensors that are averaged."""
        return len(self._averaged)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check that :meth:`step_on` takes the tensors.

        Args:
            tensors: Tensors to average.

        Raises:
            OptionError: Their shapes or types differ from the averager's tensors.
        """
        mine, others = self._kinds, list(map(_kind, tensors))
        if mine != others:
            at = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), -1)
            differ = f"number {at}: {mine[at]} and {others[at]}" if at >= 0 else ""
            raise OptionError(
                f"the averager has {len(mine)} tensors and the model {len(others)} parameters; "
                f"{differ or 'their numbers differ'}; wanted MoshpitAverager(swarm, model), or "
                f"(swarm, model.parameters()), made when the model is on its device"
            )


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.device)


def check_weight(weight: float) -> float:
    """A peer's weight in a mean, of any type of number. OptionError: it isn't 0 to 1e6."""
    if not 0 <= weight <= 1e6:
        raise OptionError(f"weight is {weight}, wanted 0 to 1e6")
    return float(weight)


def check_seconds(timeout: float) -> float:
    """A timeout. OptionError: it can't be."""
    if not 0 <= timeout <= MOST_SECONDS:
        raise OptionError(f"timeout is {timeout}, wanted 0 to {MOST_SECONDS:g} seconds")
    return timeout


def averaged(tensors: Iterable[Tensor] | nn.Module) -> list[Tensor]:
    """The tensors that are averaged, in order: of a module no frozen parameters."""
    if isinstance(tensors, nn.Module):
        buffers = [one for one in tensors.buffers() if one.is_floating_point()]
        tensors = [*tensors.parameters(), *buffers]
    return [one for one in tensors if not isinstance(one, nn.Parameter) or one.requires_grad]


def _settings(
    tensors: Sequence[Tensor], grid: str, max_missing: float | None, max_norm: float | None
) -> dict[str, object]:
    """Tells apart what must not be averaged with one another."""
    shapes: list[object] = [(str(one.dtype), tuple(one.shape)) for one in map(local, tensors)]
    shards: list[Any] = [one for one in tensors if is_dtensor(one)]
    shapes += [(one.placements, tuple(one.shape)) for one in shards]
    return {
        "tensors": len(tensors),
        "values": sum(local(tensor).numel() for tensor in tensors),
        **({"shard": _shard(shards[0])} if shards else {}),
        SHAPES: hashlib.sha256(str(shapes).encode()).hexdigest()[:16],
        "grid": grid or "by peers",
        "max_missing": max_missing,
        "max_norm": max_norm,
    }


def _shard(tensor: Any) -> str:
    """Place of this rank in the mesh of a DTensor: shards of other places must not meet."""
    mesh = tensor.device_mesh
    return " of ".join("/".join(map(str, one)) for one in (mesh.get_coordinate(), mesh.shape))


@dataclass
class OneRound:
    """One round, maybe on a thread of its own. ``values`` become its means. ``before`` and ``at``
    are its caller's: the values, and its steps, as it began. ``step``: has the round."""

    values: list[Tensor]
    before: list[Tensor]
    at: int
    step: Callable[[], RoundReport]
    report: Future[RoundReport] = field(default_factory=Future)
    began = 0.0

    def run(self) -> None:
        """Has the round, on this thread."""
        self.began = time.monotonic()
        try:
            self.report.set_result(self.step())
        except Exception as error:  # the thread that asks for the report raises it
            self.report.set_exception(error)

    def start(self) -> None:
        start_thread(self.run, "moshpit round")

"""ElasticWorld: torch's default group, made anew whenever ranks have come back.

docs/rejoin-protocol.md has the protocol; agreement.py decides who meets.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.backend.process_group import of
from lossycoll.errors import (
    CheckpointError,
    ClosedError,
    LossyError,
    OperationTimeout,
    OptionError,
    PeerLostError,
)
from lossycoll.options.fields import Options
from lossycoll.options.scopes import reliable
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.keys.secret import find_secret
from lossycoll.runtime.world.polled_store import PolledStore, own_connection
from lossycoll.train.common.packing import Bytes, state_from, unpacked

from .agreement import FRESH, Agreement, Generation, LastGeneration, Participant

AHEAD: Final = 3
"""Boundaries from the one at which somebody says when to leave to the one at which all do."""
NEVER: Final = 1 << 62
WATCH_SECONDS: Final = 0.5
MOST_WATCH_SECONDS: Final = 30.0  # between two looks into a store that fails
JOIN_SECONDS: Final = 5.0  # a thread that asks a frozen store is left behind after so long
log: Final = logging.getLogger("lossycoll")


@dataclass(frozen=True)
class WorldChange:
    """Change of the group.

    Attributes:
        generation: The new group's number.
        slots: Slots of the new group's ranks.
        came: Slots that weren't in the last group.
        lost: Slots of the last group that aren't in this one.
        seconds: Seconds from the end of the last group until the new one was made.
    """

    generation: int
    slots: tuple[int, ...]
    came: tuple[int, ...]
    lost: tuple[int, ...]
    seconds: float


class ElasticWorld:
    """Torch's default group, remade at a boundary when ranks have come back.

    Args:
        store: A torch store that outlives the ranks, the same for all.
        slot: This process's number, from 0 on; its replacement has the same.
        slots: Number of slots.
        options: Options of the groups, as ``pg_options``; ``on_peer_loss`` defaults to "continue".
        grace: Seconds to wait for a member of the last group when a new group is made, and maximum
            seconds for making the group. Use several times the duration of a step.
        timeout: Timeout in seconds, of the meeting and of the group's calls.

    Raises:
        OptionError: An argument is invalid, or there is a default group already.
        OperationTimeout: No group was made in time: slots are missing, or the others never came to
            a boundary.
        RendezvousError: Another process has this slot, or the job has ended.
        LossyError: The group can't be made.
    """

    def __init__(
        self,
        store: Store,
        slot: int,
        slots: int,
        *,
        options: Mapping[str, Any] | None = None,
        grace: float = 30.0,
        timeout: float = 300.0,
    ) -> None:
        if not 0 <= slot < slots:
            raise OptionError(f"slot {slot} of {slots}: wanted one from 0 to {slots - 1}")
        if not (grace > 0 and timeout > 0):
            raise OptionError(f"grace {grace} and timeout {timeout}: wanted seconds above 0")
        if dist.is_initialized():
            raise OptionError(
                f"slot {slot}: there is a default group already; ElasticWorld makes it, in place "
                f"of init_process_group"
            )
        self.slot = slot
        self._store = store
        self._options = {"on_peer_loss": "continue", **(options or {})}
        self._grace = grace
        self._timeout = timeout
        own = own_connection(PrefixStore("elastic", store))
        polled = PolledStore(own, f"slot {slot}", find_secret())
        self._agreement = Agreement(polled, slot, slots, secrets.token_hex(8))
        self._watcher: Watcher | None = None
        self._generation: Generation | None = None  # the latest group that worked
        self._next = 0  # the first generation that this process wasn't in
        self._refused: set[str] = set()  # incarnations that couldn't take the state
        self._closed = False
        self._meet(FRESH)

    @property
    def generation(self) -> int:
        """The group's number, which counts remakes by any rank."""
        return self._now.number

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the group's ranks, in torch's order."""
        return self._now.slots

    @property
    def _now(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def boundary(self, steps: int) -> WorldChange | None:
        """Remake the group if a rank has come back. All ranks must call this between two steps.

        Args:
            steps: Steps of this rank's state. The rank with the most gives its state to the others.

        Returns:
            The change; None if the group is the same, as it nearly always is.

        Raises:
            OptionError: ``steps`` can't be.
            LossyError: The group has failed, or none could be made; ``recover`` may help.
        """
        _check_steps(steps)
        if self._watcher is None:
            raise self._no_group()
        return self._meet(steps) if self._watcher.boundary() else None

    def recover(self, error: BaseException, steps: int | None) -> WorldChange:
        """After the loss of a rank, leave the group and form one with the ranks that are there.

        Args:
            error: The exception that the lost rank caused; it is logged.
            steps: Steps of this rank's state; None: others must not take it.

        Returns:
            The change of the group.

        Raises:
            OptionError: ``steps`` can't be.
            CheckpointError: This rank couldn't take the state of the others.
            ClosedError: The world was closed.
            OperationTimeout: No group in time.
            RendezvousError: Another process has this slot, or the store fails.
        """
        if steps is not None:
            _check_steps(steps)
        if self._closed:
            raise self._no_group()
        if self._agreement.incarnation in self._refused:
            raise CheckpointError(
                f"slot {self.slot}: the others continue without this process, which couldn't take "
                f"their state; end it, and see why"
            ) from error
        log.warning("slot %d: leaves generation %d: %s", self.slot, self._next - 1, error)
        return self._meet(FRESH if steps is None else steps)

    def share(self, *parts: Stateful) -> int:
        """Copy the state of the rank with the most steps to all ranks.

        Args:
            parts: Objects with ``state_dict`` and ``load_state_dict``: model, optimizer, scheduler.
                They are the same on all ranks. States hold tensors, numbers, text, dicts and lists.

        Returns:
            The steps of that state; 0 for a new job, which takes the first slot's state.

        Raises:
            CheckpointError: The state can't be sent (on all ranks), or this rank can't load it.
            PeerLostError: A rank was lost meanwhile, or couldn't load the state.
            ClosedError: There is no group.
        """
        if self._watcher is None or self._generation is None:
            raise self._no_group()
        members, source = self._generation.members, self._generation.source
        skeleton, data = state_from(source, lambda: [part.state_dict() for part in parts])
        why = "" if dist.get_rank() == source else _loaded(parts, skeleton, data)
        failed = _ranks_of(bool(why))
        if not failed:
            return max(members[source].steps, 0)
        self._refused |= {members[rank].incarnation for rank in failed}
        donor = f"the state of slot {members[source].slot}"
        if why:
            raise CheckpointError(
                f"slot {self.slot} can't take {donor}: {why}; do all ranks share the same parts in "
                f"the same order?"
            )
        raise PeerLostError(
            f"slot {members[failed[0]].slot} can't take {donor}; recover() continues without it",
            peer=failed[0],
        )

    def close(self) -> None:
        """Leave the group, and mark in the store that this rank has ended in good order.

        Idempotent.
        """
        before = None if self._watcher is None else self._before()
        if before is not None:

            def mark() -> None:
                with contextlib.suppress(LossyError):  # a store that has ended, too
                    self._agreement.end(before.generation, before.lost)

            start_thread(mark, "lossycoll-elastic-end").join(JOIN_SECONDS)
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def _no_group(self) -> ClosedError:
        how = "was closed" if self._closed else "has no group: call recover() first"
        return ClosedError(f"slot {self.slot}: this ElasticWorld {how}")

    def __enter__(self) -> ElasticWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:  # who failed may be started again
            self._closed = True
            self._leave()

    def _before(self) -> LastGeneration | None:
        """Where this process comes from, and who of it is known to be dead: not those that left."""
        if self._generation is None:
            return None
        gone: set[int] = set()
        if self._watcher is not None and dist.is_initialized():
            group = of(None)
            lost = [rank for rank in group.lossy_stats().lost if not group.lossy_has_left(rank)]
            gone = {self._generation.slots[rank] for rank in lost}
        return LastGeneration(self._generation, frozenset(gone), frozenset(self._refused))

    def _meet(self, steps: int) -> WorldChange:
        begin = time.monotonic()
        self._agreement.next_number()  # a store that fails is known before a group is left
        last, before = self._generation, self._before()
        self._leave()
        while True:
            left = begin + self._timeout - time.monotonic()
            agreed = self._agreement.meet(steps, before, self._next, self._grace, left)
            self._next = agreed.number + 1
            try:
                self._make(agreed)
                break
            except OptionError:
                raise
            except (LossyError, dist.DistError) as error:
                if last is None:
                    raise
                # Members that were together before try without those that have come.
                known = {one.incarnation for one in last.members}
                fresh = {one.incarnation for one in agreed.members if one.incarnation not in known}
                self._refused |= fresh
                before = LastGeneration(
                    last, before.lost if before else frozenset(), frozenset(self._refused)
                )
                if time.monotonic() - begin > self._timeout:
                    raise OperationTimeout(
                        f"slot {self.slot}: no group within {self._timeout:g} s; the last: {error}"
                    ) from error
                log.warning("slot %d: generation %d failed: %s", self.slot, agreed.number, error)
        self._generation = agreed
        members = () if last is None else last.members
        change = WorldChange(
            agreed.number,
            agreed.slots,
            _slots_of(agreed.members, without=members),
            _slots_of(members, without=agreed.members),
            time.monotonic() - begin,
        )
        if last is not None:
            log.warning("slot %d: %s", self.slot, change)
        return change

    def _make(self, agreed: Generation) -> None:
        rank = agreed.slots.index(self.slot)
        try:
            dist.init_process_group(
                "lossy",
                store=PrefixStore(f"elastic/{agreed.number}", self._store),
                rank=rank,
                world_size=len(agreed.members),
                # All were here a moment ago: whoever isn't now is missing.
                timeout=timedelta(seconds=min(self._grace, self._timeout)),
                pg_options=Options(**self._options),
            )
        except Exception:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise
        of(None).set_timeout(timedelta(seconds=self._timeout))
        self._watcher = Watcher(self._agreement, agreed)


class Watcher:
    """One generation's boundaries: when to leave it, on all ranks alike."""

    def __init__(self, agreement: Agreement, generation: Generation) -> None:
        self._agreement = agreement
        self._generation = generation
        self._number = 0
        self._leave = NEVER
        self._said: torch.Tensor | None = None
        self._work: Any = None
        self._waited = threading.Event()
        self._over = threading.Event()
        self._thread = start_thread(self._watch, "lossycoll-elastic", self._over.set)

    def boundary(self) -> bool:
        """Counts a boundary, on all ranks; returns whether all leave here."""
        self._number += 1
        if self._work is not None:
            self._hear()
        if self._number >= self._leave:
            return True
        if self._leave == NEVER and self._waited.is_set():
            self._leave = self._number + AHEAD
        self._said = torch.tensor([self._leave], device="cpu")
        self._work = dist.all_reduce(self._said, dist.ReduceOp.MIN, async_op=True)
        return False

    def close(self) -> None:
        self._over.set()
        self._thread.join(JOIN_SECONDS)

    def _hear(self) -> None:
        assert self._said is not None
        try:
            self._work.wait()
        except LossyError as error:
            # Somebody died in it: what the others heard comes with the next, if the group goes on.
            log.info("boundary %d wasn't heard of: %s", self._number - 1, error)
        else:
            self._leave = min(self._leave, int(self._said))

    def _watch(self) -> None:
        """On its own thread: asks the store, where this is the lowest rank that is left."""
        watch = self._agreement.watch(self._generation.number + 1)
        group, pause = of(None), WATCH_SECONDS
        others = set(range(group.rank()))
        while not self._over.wait(pause):
            if others - set(group.lossy_stats().lost):
                continue
            try:
                waits = watch.look(time.monotonic())
            except LossyError as error:
                if pause == WATCH_SECONDS:
                    log.warning("nobody can come back while this lasts: %s", error)
                pause = min(MOST_WATCH_SECONDS, 2 * pause)
                continue
            pause = WATCH_SECONDS
            if waits:
                self._waited.set()
                return


def _slots_of(
    members: tuple[Participant, ...], *, without: tuple[Participant, ...]
) -> tuple[int, ...]:
    """Slots of members by process: one that was killed and came back has its slot, and isn't it."""
    known = {one.incarnation for one in without}
    return tuple(one.slot for one in members if one.incarnation not in known)


def _check_steps(steps: int) -> None:
    if type(steps) is not int or not 0 <= steps < 1 << 62:
        raise OptionError(f"steps {steps!r}: wanted a whole number, 0 or more")


class Stateful(Protocol):
    """Object that has a state: modules, optimizers, schedulers."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what it had, as torch's."""


def _loaded(parts: Sequence[Stateful], skeleton: bytes, data: Bytes) -> str:
    """Why it couldn't be loaded; empty if it was."""
    try:
        states = unpacked(skeleton, data, copies=True)
        if not isinstance(states, list) or len(states) != len(parts):
            return f"{len(states)} states came, and {len(parts)} parts are here"
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    except Exception as error:  # of a user's class, whatever it is: all ranks hear of it
        return f"{type(error).__name__}: {error}"
    return ""


def _ranks_of(own: bool) -> list[int]:
    """The ranks of the default group that say so, on all of them."""
    told = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device="cpu")
    told[dist.get_rank()] = own
    with reliable():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    ranks: list[int] = told.nonzero().flatten().tolist()
    return ranks

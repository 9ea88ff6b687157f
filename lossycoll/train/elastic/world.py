"""ElasticWorld: torch's default group, made anew whenever ranks have come back.

docs/rejoin.md has the protocol; meeting.py is who meets, sharing.py what they then have in common.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.backend.process_group import of
from lossycoll.errors import LossyError, OperationTimeout, OptionError
from lossycoll.options.fields import Options

from .meeting import FRESH, Generation, Meeting, Member
from .sharing import Stateful, share

AHEAD: Final = 3
"""Boundaries from the one at which somebody says when to leave to the one at which all do."""
NEVER: Final = 1 << 62
WATCH_SECONDS: Final = 0.5
log: Final = logging.getLogger("lossycoll")


@dataclass(frozen=True)
class WorldChange:
    """What became of the group.

    Attributes:
        generation: The new group's number.
        seats: Of its ranks.
        came: Those that weren't in the last one.
        lost: Those of the last one that aren't in this one.
        seconds: From the end of the last group until the new one was there.
    """

    generation: int
    seats: tuple[int, ...]
    came: tuple[int, ...]
    lost: tuple[int, ...]
    seconds: float


class ElasticWorld:
    """Makes torch's default group, and makes it anew at a boundary when ranks have come back.

    Args:
        store: A store of torch that outlives the ranks, the same for all.
        seat: This process's number, from 0 on; whoever is started in its place has the same.
        seats: How many there are.
        options: Of the groups, as ``pg_options``; ``on_peer_loss`` is "continue" unless given.
        grace: Seconds that a member of the last group is waited for when a new one is made.
        timeout: Seconds until a group is there, and that its calls wait.

    Raises:
        OptionError: An argument can't be.
        OperationTimeout: No group in time: seats are missing, or the others never came to a
            boundary.
        RendezvousError: Another process has this seat.
        LossyError: The group can't be made.
    """

    def __init__(
        self,
        store: Store,
        seat: int,
        seats: int,
        *,
        options: Mapping[str, Any] | None = None,
        grace: float = 30.0,
        timeout: float = 300.0,
    ) -> None:
        if not 0 <= seat < seats:
            raise OptionError(f"seat {seat} of {seats}: wanted one from 0 to {seats - 1}")
        if not (grace > 0 and timeout > 0):
            raise OptionError(f"grace {grace} and timeout {timeout}: wanted seconds above 0")
        self.seat = seat
        self._store = store
        self._options = {"on_peer_loss": "continue", **(options or {})}
        self._grace = grace
        self._timeout = timeout
        own = PrefixStore("elastic", store)
        self._meeting = Meeting(own, seat, seats, secrets.token_hex(8))
        self._watcher: Watcher | None = None
        self._generation: Generation | None = None
        self._meet(FRESH, set())

    @property
    def generation(self) -> int:
        """The group's number: how often it was made anew, by whomever."""
        return self._now.number

    @property
    def seats(self) -> tuple[int, ...]:
        """The seats of the group's ranks, in torch's order."""
        return self._now.seats

    @property
    def _now(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def boundary(self, steps: int) -> WorldChange | None:
        """Between two steps, on all ranks: makes the group anew if somebody has come back.

        Args:
            steps: That this rank's state has had; who has the most gives its own.

        Returns:
            What has changed; None: nothing, as nearly always.

        Raises:
            OptionError: ``steps`` can't be.
            LossyError: The group has failed, or none could be made; ``recover`` may help.
        """
        _check_steps(steps)
        assert self._watcher is not None
        if not self._watcher.boundary():
            return None
        return self._meet(steps, self._lost_seats())

    def recover(self, error: BaseException, steps: int) -> WorldChange:
        """After an error of this group: leaves it, and comes back as a killed rank would.

        Args:
            error: What was raised; it is logged.
            steps: That this rank's state has had.

        Returns:
            What has changed.

        Raises:
            OptionError: ``steps`` can't be.
            OperationTimeout: No group in time.
            RendezvousError: Another process has this seat.
        """
        _check_steps(steps)
        log.warning("seat %d: leaves generation %d: %s", self.seat, self.generation, error)
        return self._meet(steps, self._lost_seats())

    def share(self, *parts: Stateful) -> int:
        """Gives all ranks the state of the one that has taken the most steps.

        Args:
            parts: Whatever has ``state_dict`` and ``load_state_dict``: model, optimizer, scheduler.
                The same on all ranks; tensors, numbers, text, dicts and lists.

        Returns:
            The steps that the state has had; 0 for a new job, whose first seat's is taken.

        Raises:
            CheckpointError: A state that can't travel, or isn't of these parts; on all ranks.
            LossyError: A rank was lost meanwhile.
        """
        share(parts, self._now.source)
        return max(self._now.members[self._now.source].steps, 0)

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> ElasticWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lost_seats(self) -> set[int]:
        if not dist.is_initialized():
            return set()
        return {self._now.seats[rank] for rank in of(None).lossy_stats().lost}

    def _meet(self, steps: int, lost: set[int]) -> WorldChange:
        begin = time.monotonic()
        last = self._generation
        self.close()
        while True:
            left = begin + self._timeout - time.monotonic()
            agreed = self._meeting.meet(steps, self._generation, lost, self._grace, left)
            self._generation = agreed
            try:
                self._make(agreed)
                break
            except OptionError:
                raise
            except (LossyError, dist.DistError) as error:
                # Who died meanwhile isn't at the next meeting.
                if time.monotonic() - begin > self._timeout:
                    raise OperationTimeout(
                        f"seat {self.seat}: no group within {self._timeout:g} s; the last: {error}"
                    ) from error
                log.warning("seat %d: generation %d failed: %s", self.seat, agreed.number, error)
                lost = set()
        before = () if last is None else last.members
        change = WorldChange(
            agreed.number,
            agreed.seats,
            _seats_of(agreed.members, without=before),
            _seats_of(before, without=agreed.members),
            time.monotonic() - begin,
        )
        if last is not None:
            log.warning("seat %d: %s", self.seat, change)
        return change

    def _make(self, agreed: Generation) -> None:
        rank = agreed.seats.index(self.seat)
        dist.init_process_group(
            "lossy",
            store=PrefixStore(f"elastic/{agreed.number}", self._store),
            rank=rank,
            world_size=len(agreed.members),
            # All were here a moment ago: whoever isn't now is missing.
            timeout=timedelta(seconds=min(self._grace, self._timeout)),
            pg_options=Options(**self._options),
        )
        of(None).set_timeout(timedelta(seconds=self._timeout))
        self._watcher = Watcher(self._meeting, agreed)


class Watcher:
    """One generation's boundaries: when to leave it, on all ranks alike.

    Args:
        meeting: This process's.
        generation: The group that is.
    """

    def __init__(self, meeting: Meeting, generation: Generation) -> None:
        self._meeting = meeting
        self._generation = generation
        self._number = 0
        self._leave = NEVER
        self._said: torch.Tensor | None = None
        self._work: Any = None
        self._waited = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lossycoll-elastic", daemon=True)
        self._thread.start()

    def boundary(self) -> bool:
        """Whether all leave here.

        Raises:
            LossyError: The group has failed.
        """
        self._number += 1
        if self._work is not None:
            self._hear()
        if self._number >= self._leave:
            return True
        if self._leave == NEVER and self._waited.is_set():
            self._leave = self._number + AHEAD
        self._said = torch.tensor([self._leave])
        self._work = dist.all_reduce(self._said, dist.ReduceOp.MIN, async_op=True)
        return False

    def close(self) -> None:
        """Ends its thread. Idempotent."""
        self._over.set()
        self._thread.join()

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
        watch, rank = None, dist.get_rank()
        while not self._over.wait(WATCH_SECONDS):
            try:
                if set(range(rank)) - set(of(None).lossy_stats().lost):
                    continue
                if watch is None:
                    watch = self._meeting.watch(self._generation.number + 1)
                if watch.look(time.monotonic()):
                    self._waited.set()
                    return
            except Exception as error:
                log.warning("nobody can come back: the store doesn't answer: %s", error)
                return


def _seats_of(members: tuple[Member, ...], *, without: tuple[Member, ...]) -> tuple[int, ...]:
    """By process, not by seat: one that was killed and came back has its seat, and isn't it."""
    known = {one.start for one in without}
    return tuple(one.seat for one in members if one.start not in known)


def _check_steps(steps: int) -> None:
    if type(steps) is not int or not 0 <= steps < 1 << 62:
        raise OptionError(f"steps {steps!r}: wanted a whole number, 0 or more")

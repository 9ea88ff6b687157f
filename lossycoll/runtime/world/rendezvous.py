"""Rendezvous of a group's ranks through a torch store.

The store may be older than this group: a restarted job and a second init in one process see the
keys of those before. So rank 0 makes a fresh session; every other rank answers below it with a
nonce of its own; rank 0 writes the roster; and a rank believes only a roster with its own nonce.
Values are polled, never waited for: a blocking get would hold the store's client for all threads.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.core.logfmt import named
from lossycoll.runtime.keys.secret import Secret, transcript

from .polled_store import PIECE_BYTES, Pause, PolledStore, Store, is_form, overwritten, parsed

SESSION: Final = re.compile("[0-9a-f]{16}")
"""The session as a rank reads it."""
PATIENCE_SECONDS: Final = 2.0
"""Time for a process of the right secret after one of another, with the same rank."""
GRACE_SECONDS: Final = 5.0
"""Time for which rank 0 of a refused group tells late ranks."""
MOST_CLAIMS: Final = 64
"""Most claims of one rank that are read."""
_ENTRY: Final = {"nonce": str, "who": str, "hello": dict, "error": str}
"""Fields of what a rank says of itself, and their types."""
_REFUSED: Final = {"error": str, "peer": int, "nonces": list}
_ROSTER: Final = {"ranks": list, "nonces": list}
_met_here: Final[set[tuple[str, int, str]]] = set()
"""(session, rank, description) of every group that has met in this process, over or not."""


@dataclass(eq=False)
class Rendezvous:
    """Rendezvous of one group. ``meet`` first, then any number of ``exchange`` rounds."""

    store: Store
    rank: int
    size: int
    timeout: float  # seconds for all rounds together
    _: KW_ONLY
    describe: str  # names this process for others (host, pid)
    # Whether a rank 0 that once said this hello still runs, which tells a doubled rank from the
    # keys of a job that is over
    alive: Callable[[Mapping[str, Any]], bool] = lambda hello: False
    secret: Secret | None = None  # seals all values; None: they are in clear

    def __post_init__(self) -> None:
        self._store = PolledStore(self.store, f"rank {self.rank}/{self.size}", self.secret)
        self._end = time.monotonic() + self.timeout
        self._nonce = secrets.token_hex(16)
        """Of this rank's incarnation and this meeting: no other has the same."""
        self._told_apart = ""
        """What this rank couldn't read, and has told."""
        self._apart: dict[int, float] = {}
        """At rank 0, the ranks that couldn't read the session at some time, and the first one."""
        self._met = False
        self._nonces: list[str] = []
        self.session = ""
        """16 hex digits, equal on all ranks; empty until ``meet`` is over."""

    @property
    def transcript(self) -> str:
        """Text that tells this meeting from all others, to derive keys from; after ``meet``."""
        return transcript(self.session, self._nonces)

    def meet(self, hello: Mapping[str, Any], error: Exception | None = None) -> list[Any]:
        """Returns the hello of every rank, by rank.

        A rank that can't take part says so by ``error``: then all ranks raise RendezvousError at
        once, and that one its own error. RendezvousError: ranks are missing when the time is over,
        or more than one process claims a rank.
        """
        mine = {
            "nonce": self._nonce,
            "who": self.describe,
            "hello": dict(hello),
            "error": "" if error is None else str(error),
        }
        try:
            roster = self._gather(mine) if self.rank == 0 else self._answer(mine)
        except RendezvousError:
            if error is not None:
                raise error from None
            raise
        self._met = True
        _met_here.add((self.session, self.rank, self.describe))
        return [entry["hello"] for entry in roster]

    def exchange(
        self, name: str, value: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """One more round: every rank's ``value`` (JSON), by rank. ``name`` is the round's own.
        ``meanwhile`` is called again and again until all have come. RendezvousError: a rank doesn't
        come, or has parted with an error."""
        self._set(f"{name}/{self.rank}", value)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        pause = Pause()
        while (values := self._get_all(keys, len(json.dumps(value)))) is None:
            if pause.is_long:
                self._check_going_on(name, keys)
            meanwhile()
            pause()
        return values

    def check_followed(self, ranks: Iterable[int] = ()) -> None:
        """For whoever waits for others, as after the last round. RendezvousError: this is rank 0,
        and one of the others (``ranks``; none: any) has followed a second one before it saw the
        roster. That there is a second one is no reason: the others may be past the last round."""
        if self.rank == 0 and self._session_now() != self.session:
            for rank in ranks or range(1, self.size):
                if self._get(f"turned/{rank}") == self._nonces[rank]:
                    raise self._second_master() or self._claimed_twice(0, "another")

    def tell(self, name: str, value: Any) -> None:
        """Says ``value`` (JSON) to whoever asks for it by :meth:`told`; the last one counts.
        Nothing where the store has gone: the control plane finds out why."""
        with contextlib.suppress(RendezvousError):
            self._set(f"{name}/{self.rank}", value)

    def told(self, name: str, rank: int) -> Any:
        try:
            return self._get(f"{name}/{rank}")
        except RendezvousError:
            return None

    def parted(self) -> RendezvousError | None:
        """The error by which another rank has ended the rendezvous for all, if one has."""
        try:
            return self._failed()
        except RendezvousError:  # the store has gone: the control plane finds out why
            return None

    def part(self, error: Exception) -> None:
        """To be called before ``error`` is raised, which ends the rendezvous for all ranks. Rank 0
        waits a little for the others: it may be the store's server, and then what they have not
        read yet would go with it."""
        if not self.session:
            return
        try:
            # A process that is not in the roster has no say in the group of those that are.
            if self._met and self._get("failed") is None:
                self._set("failed", {"rank": self.rank, "error": str(error)})
            if self.rank != 0:
                self._set(f"parted/{self.rank}", True)
                return
            end = time.monotonic() + GRACE_SECONDS
            pause = Pause()
            waiting = set(range(1, self.size))
            while waiting and time.monotonic() < end:
                pause()
                for rank in sorted(waiting):
                    here = self._get(f"hello/{rank}") is not None
                    if not here or self._get(f"parted/{rank}"):
                        waiting.discard(rank)
        except RendezvousError:
            return

    # ---- rank 0 ----

    def _gather(self, mine: dict[str, Any]) -> list[Any]:
        before = self._session_now()
        if (taken := self._taken(before)) is not None:
            raise taken
        self.session = secrets.token_hex(8)
        self._set("who", self.describe)
        written = self._store.set("session", self.session)
        roster: dict[int, Any] = {0: mine}
        # Another group may have met between the two looks. Those it has not are told.
        refusal = self._refusal(roster) or self._taken(before)
        end = self._end
        pause = Pause()
        while True:
            self._hear(roster, one_by_one=pause.is_long)
            refusal = refusal or self._refusal(roster)
            if len(roster) == self.size:
                break
            if refusal is None:
                refusal = self._overwritten_session()
            second = self._second_master()
            if second is not None and self._session_now() != self.session:
                raise second  # the others have turned away from this process
            refusal = refusal or second
            if pause.is_long and refusal is None:
                refusal = self._find_apart(written, roster)
            if refusal:
                self._refuse(refusal, roster)
                self._answer_apart(written, roster)
                # The latecomers are to hear of it as well, but not for long.
                end = min(end, time.monotonic() + GRACE_SECONDS)
                if len(self._apart.keys() | roster.keys()) == self.size:
                    break
            if time.monotonic() > end:
                break
            pause()
        missing = [rank for rank in range(self.size) if rank not in roster]
        if refusal is None and missing:
            refusal = self._missing(missing)
        elif refusal is None:
            refusal = self._doubled()
        if refusal is not None:
            self._refuse(refusal, roster)
            raise refusal
        out = [roster[rank] for rank in range(self.size)]
        self._nonces = [entry["nonce"] for entry in out]
        self._set("roster", {"ranks": out, "nonces": self._nonces})
        # Of a second rank 0 that looked before there was a roster, this is the last chance to tell.
        self._second_master()
        return out

    def _hear(self, roster: dict[int, Any], *, one_by_one: bool) -> None:
        """Adds those that have come to the roster; not ``one_by_one``: once all have."""
        ranks = [rank for rank in range(1, self.size) if rank not in roster]
        found: dict[int, Any] = {}
        if one_by_one:
            found = {rank: self._get(f"hello/{rank}") for rank in ranks}
        elif (said := self._get_all([f"hello/{rank}" for rank in ranks])) is not None:
            found = dict(zip(ranks, said, strict=True))
        for rank, entry in found.items():
            if entry is not None:
                roster[rank] = entry
                if not is_form(entry, **_ENTRY):  # it has been overwritten: all hear of it
                    why = overwritten(self._key(f"hello/{rank}"), entry)
                    roster[rank] = {"nonce": "", "who": "unreadable", "hello": {}, "error": why}

    def _doubled(self) -> RendezvousError | None:
        """Error if several processes claim a rank, once all ranks have come."""
        claims = self._store.counts([self._key(f"claims/{rank}") for rank in range(1, self.size)])
        twice = next((rank for rank, claimed in enumerate(claims, 1) if claimed > 1), None)
        return None if twice is None else self._claimed_twice(twice)

    def _taken(self, before: str) -> RendezvousError | None:
        """Rank 0's place is another's: it wrote the session before this one, and its group met."""
        if not before or not self._is_anothers(before):
            return None
        return self._claimed_twice(0, self._names(before) or "another")

    def _refusal(self, roster: Mapping[int, Any]) -> RendezvousError | None:
        """The error that all ranks raise because one in the roster can't take part."""
        for rank, entry in roster.items():
            if entry["error"]:
                return self._error(
                    f"rank {rank} ({entry['who']}) can't take part: {entry['error']}", rank
                )
        return None

    def _refuse(self, error: RendezvousError, roster: Mapping[int, Any]) -> None:
        """Writes a roster that makes every rank in it raise, doubled ones included."""
        nonces = [entry["nonce"] for entry in roster.values()]
        for rank in range(1, self.size):
            nonces += [entry["nonce"] for entry in self._claimed(rank)]
        self._set("roster", {"error": str(error), "peer": error.peer, "nonces": nonces})

    def _overwritten_session(self) -> RendezvousError | None:
        """Something that isn't a rank 0 has written another session: a rank 0 says who it is first.
        The session is written again, so that the others come back and hear of it."""
        now = self._session_now()
        if now == self.session or self._names(now) is not None:
            return None
        found = self._store.get("session")
        if found == self.session:
            return None
        self._store.set("session", self.session)
        return self._error(overwritten("session", found), 0)

    def _second_master(self) -> RendezvousError | None:
        """Finds a second rank 0: the later one overwrites the session, and the first sees it, and
        tells the second through a key of the second's session."""
        now = self._session_now()
        # Of what something else wrote :meth:`_overwritten_session` tells all.
        second = None if now == self.session else self._names(now)
        if second is not None:
            self._store.set(f"{now}/second", json.dumps(self.describe))
        other = self._get("second") or second
        return None if other is None else self._claimed_twice(0, other)

    # ---- the others ----

    def _answer(self, mine: dict[str, Any]) -> list[Any]:
        pause = Pause()
        looked = ""
        while True:
            session = self._session_now()
            if not session:
                self._tell_apart()
            if session and session != self.session:
                if self.session:
                    self._set(f"turned/{self.rank}", self._nonce)
                self.session = session
                self._claim(mine)
            roster = self._get("roster") if self.session else None
            is_met = is_form(roster, **_ROSTER)
            if roster is not None and not (is_met or is_form(roster, **_REFUSED)):
                self._met = True  # as far as rank 0 knows: it is to hear of this
                raise self._error(overwritten(self._key("roster"), roster), 0)
            if roster is not None and self._nonce in roster["nonces"]:
                if not is_met:
                    raise self._error(f"refused by rank 0: {roster['error']}", roster["peer"])
                ranks, nonces = roster["ranks"], roster["nonces"]
                if not (
                    len(ranks) == len(nonces) == self.size
                    and all(is_form(entry, **_ENTRY) for entry in ranks)
                ):
                    raise self._error(overwritten(self._key("roster"), roster), 0)
                self._nonces = nonces
                return list(ranks)
            if roster is not None and looked != self.session:
                # A group that is over, or one in which this rank's place is taken.
                looked = self.session
                if self._is_anothers(self.session):
                    raise self._claimed_twice(self.rank)
            if time.monotonic() > self._end:
                # Rank 0 is the first that can't be reached, unless it has opened the joining.
                names = [f"hello/{rank}" for rank in range(1, self.size)]
                missing = [n for n, name in enumerate(names, 1) if self._get(name) is None]
                raise self._missing(missing if self.session and missing else [0])
            pause()

    def _claim(self, mine: dict[str, Any]) -> None:
        """Takes this rank's place in the session; a second taker is noticed by the counter."""
        n = self._store.add(self._key(f"claims/{self.rank}"), 1)
        self._set(f"claimed/{self.rank}/{n}", {"nonce": self._nonce, "who": self.describe})
        self._set(f"hello/{self.rank}", mine)

    # ---- what both know ----

    def _error(self, text: str, peer: int) -> RendezvousError:
        return RendezvousError(f"rank {self.rank}/{self.size}: {text}", peer=peer)

    def _missing(self, ranks: Sequence[int]) -> RendezvousError:
        return self._error(
            f"{_are(ranks)} missing after {self.timeout:g} s; are all processes started, with "
            f"one world size and one master?",
            ranks[0],
        )

    def _session_now(self) -> str:
        """Empty while there is none that this rank can read."""
        found = self._store.get("session") or ""
        return found if SESSION.fullmatch(found) else ""

    def _is_anothers(self, session: str) -> bool:
        """True if another process has this rank's place in a session that has met: its rank 0 runs.
        Not where this very process has met before: rank 0 may just be slower to leave, or listen at
        the same port again."""
        if (session, self.rank, self.describe) in _met_here:
            return False
        roster = parsed(self._store.get(f"{session}/roster") or "{}")
        first = roster["ranks"][:1] if is_form(roster, **_ROSTER) else []
        return bool(first) and is_form(first[0], hello=dict) and self.alive(first[0]["hello"])

    def _names(self, session: str) -> str | None:
        """The process that is rank 0 of a session; None: no process has said that it is."""
        found = self._store.get(f"{session}/who") if session else None
        return None if found is None else str(parsed(found))

    def _claimed(self, rank: int) -> list[Any]:
        """Entries of the processes that claim a rank. Anybody can count up the claims. One that is
        counted but hasn't said who it is yet is waited for, ``GRACE_SECONDS`` at most: whoever
        isn't found here would not be told either."""
        claims = min(self._store.add(self._key(f"claims/{rank}"), 0), MOST_CLAIMS)
        end = time.monotonic() + GRACE_SECONDS
        pause = Pause()
        while True:
            found = [self._get(f"claimed/{rank}/{n + 1}") for n in range(claims)]
            if all(found) or time.monotonic() > end:
                return [entry for entry in found if is_form(entry, nonce=str, who=str)]
            pause()

    def _claimed_twice(self, rank: int, other: str = "") -> RendezvousError:
        """The error for a rank that several processes claim: this one and ``other``, if it is 0."""
        names = [other, self.describe] if other else [entry["who"] for entry in self._claimed(rank)]
        return self._error(
            f"more than one process claims rank {rank}: {' and '.join(map(str, names))}; every "
            f"process needs a RANK of its own",
            rank,
        )

    # ---- secrets that differ ----
    # A rank that can't read the session marks a key of its own, named after what it can't read.
    # Rank 0, which wrote that, looks for such marks. Both are in clear, and nothing but an error
    # comes of them: whoever can write to the store can keep a job from starting in any case.

    def _tell_apart(self) -> None:
        """Marks a session that can't be read. Raises if rank 0, which wrote it, has seen that."""
        digest = self._store.anothers("session", SESSION.fullmatch)
        if digest is None:
            return
        if digest != self._told_apart:
            self._told_apart = digest
            self._store.mark(f"differs/{digest}/{self.rank}")
        if self._store.is_marked(f"differs/{digest}/seen/{self.rank}"):
            raise self._differing(self.rank, 0)

    def _find_apart(self, digest: str, roster: Mapping[int, Any]) -> RendezvousError | None:
        """At rank 0, the error if a rank couldn't read the session with this digest and hasn't come
        with the right secret since."""
        now = time.monotonic()
        for rank in sorted({*range(1, self.size)} - roster.keys()):
            is_apart = self._store.is_marked(f"differs/{digest}/{rank}")
            if is_apart and now - self._apart.setdefault(rank, now) >= PATIENCE_SECONDS:
                return self._differing(rank, rank)
        return None

    def _answer_apart(self, digest: str, roster: Mapping[int, Any]) -> None:
        """At rank 0, which refuses: whoever couldn't read the session knows now that it was its."""
        for rank in sorted({*range(1, self.size)} - roster.keys()):
            if rank in self._apart or self._store.is_marked(f"differs/{digest}/{rank}"):
                self._apart.setdefault(rank, time.monotonic())
                self._store.mark(f"differs/{digest}/seen/{rank}")

    def _differing(self, rank: int, peer: int) -> RendezvousError:
        here = "has one" if self.secret is not None else "has none"
        return self._error(
            f"the secrets of rank 0 and rank {rank} differ, or only one of them has one (this rank "
            f"{here}); set LOSSYCOLL_SECRET or LOSSYCOLL_SECRET_FILE to the same on all ranks",
            peer,
        )

    # ---- the store ----

    def _failed(self) -> RendezvousError | None:
        failed = self._get("failed")
        if failed is None:
            return None
        if not is_form(failed, rank=int, error=str):
            return self._error(overwritten("failed", failed), 0)
        return self._error(
            f"rank {failed['rank']} can't take part: {failed['error']}", failed["rank"]
        )

    def _check_going_on(self, name: str, keys: Sequence[str]) -> None:
        """Raises when the round ``name`` can't end any more, or takes too long."""
        # The keys are looked at if there is a second rank 0, and not else.
        self.check_followed(rank for rank, key in enumerate(keys) if self._get(key) is None)
        if (failed := self._failed()) is not None:
            raise failed
        if time.monotonic() > self._end:
            missing = [rank for rank, key in enumerate(keys) if self._get(key) is None] or [0]
            text = f"silent in round {name!r} of the rendezvous ({self.timeout:g} s)"
            raise self._error(f"{_are(missing)} {text}", missing[0])

    def _key(self, key: str) -> str:
        return f"{self.session}/{key}"

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        found = self._store.get(self._key(key))
        return None if found is None else parsed(found)

    def _get_all(self, keys: Sequence[str], each: int = PIECE_BYTES) -> list[Any] | None:
        """``each``: about as many bytes as a value has. None while one is missing."""
        found = self._store.get_all([self._key(key) for key in keys], each)
        return None if found is None else [parsed(value) for value in found]


def _are(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'}"

"""The control plane of a group: who lives, who gives up, who means something else, who is left.

One daemon thread per group and rank, on the sockets of :mod:`hub_sockets`. The hub (the lowest
rank that has not left and is not lost) judges the others' silence and tells all; the others judge
the hub's.

==========  =========================  ========================================================
kind        fields                     meaning
==========  =========================  ========================================================
beat        figures                    the sender lives; its counters
alive       -                          to one that is silent: does it live? Over a new connection
here        -                          the answer to that
dead        rank, silent, ended        from the hub: it gives that rank up (silent: seconds)
abort       reason, kind               the sender gives the group up; the error's type
all         -                          from the hub, once: it has heard every rank
bye         seq, why                   the sender leaves after call number seq; why: its own error
missed      rank                       to the hub: the sender needs a rank that has left
waiting     seq, call                  the sender has waited for that call for a while
mismatch    seq, call, rank, other     the sender's call at seq is ``call``, rank's is ``other``
ask         -                          to the hub: send me all figures
figures     figures                    from the hub: the counters of all ranks
state       lost, next, views          to the hub: the sender has stopped before operation next
views       views                      from the hub: who is left, from which operation on
==========  =========================  ========================================================

``dead``, ``abort``, ``bye``, ``waiting`` and ``mismatch`` reach every rank, by way of the hub,
which can reach a rank once it has heard it: so nobody goes on (:meth:`Control.meet`) before the hub
has heard all. When the hub changes, all but ``waiting`` are told again. The last two kinds and
``missed`` are for groups that outlive a rank (:mod:`view_agreement`).

Long because one thread handles every kind of message, on state that belongs to it alone: who was
heard when, who has left or is lost, and what a new hub has to repeat.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import zmq

from .hub_sockets import Message, Star
from .view_agreement import Survivors, View

BEATS_PER_LIVENESS: Final = 8
SILENT_SHARE: Final = 0.7
"""Of the liveness time; the rest is for the verdict to reach every rank."""
LINGER_MS: Final = 500
PROBE_SECONDS: Final = (0.02, 1.0)
"""A rank whose connection broke is looked for this often, and for this long."""
RELAYED: Final = frozenset({"abort", "bye", "waiting", "mismatch"})
KEPT: Final = RELAYED - {"waiting"}
"""What nobody says twice, and so has to survive a hub."""


class Listener(Protocol):
    """What the control plane tells and asks. Called from its thread: must be quick, never raise.

    The last three only where the group outlives a rank. ``on_lost`` stops submitting, and returns
    the number of the next operation; ``on_views`` goes on if ``agreed``. After ``on_broken`` the
    thread ends; what is posted within still goes out.
    """

    def on_dead(self, rank: int, silent: float, ended: bool) -> None: ...
    def on_abort(self, rank: int, reason: str, kind: str) -> None: ...
    def on_bye(self, rank: int, seq: int, why: str) -> None: ...
    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None: ...
    def on_broken(self, error: Exception) -> None: ...
    def call_at(self, seq: int) -> str | None: ...
    def figures(self) -> dict[str, Any]: ...
    def on_lost(self, rank: int, silent: float, ended: bool) -> int: ...
    def on_views(self, views: Sequence[View], agreed: bool) -> None: ...
    def on_apart(self, lost: Sequence[int], left: Sequence[int]) -> None: ...


class Control:
    """One rank's end. ``open``, ``start``, ``meet``, ``leave``, ``close``.

    ``liveness`` in seconds. World >= 2. ``outlive``: the group goes on without ranks that are lost.
    ``clock``: what silence is measured by, in seconds; it never runs backwards.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        liveness: float,
        *,
        outlive: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._world = world
        self._interval = liveness / BEATS_PER_LIVENESS
        self._silence = liveness * SILENT_SHARE
        self._liveness = liveness
        self._listener: Listener | None = None
        self._star = Star(rank, world)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: deque[Message] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lock = threading.Lock()
        # The rest belongs to the thread, apart from plain reads.
        self._survivors = Survivors(rank, world) if outlive else None
        self._next = 0
        self._stopped_at = 0.0
        self._apart = False
        self._heard: dict[int, float] = {}
        self._suspects: dict[int, float] = {}
        """Ranks whose connections broke, and when."""
        self._expected: dict[int, float] = {}
        """Ranks to be heard in a star whose hub has changed, and since when."""
        self._woke: float | None = None
        """When this one had slept so long that the others may go on without it, until it knows."""
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        """Those of ``_gone`` that didn't say goodbye."""
        self._kept: dict[tuple[Any, ...], Message] = {}
        """What was told of the kinds that have to survive a hub."""
        self._briefed: set[int] = set()
        """At the hub: who has been told what was kept."""
        self._all_heard = False
        self._settled = threading.Event()
        self._figures: dict[int, dict[str, Any]] = {}
        self._fresh = threading.Event()

    @property
    def foreign(self) -> int:
        """Messages dropped since they were malformed or without the token."""
        return self._star.foreign

    def open(self, address: str, ports: tuple[int, int] = (0, 0)) -> int:
        """Listens on ``address`` and a port of ``ports`` (first, last); 0: any.

        Returns the port. Raises RendezvousError when none can be had.
        """
        return self._star.open(address, ports)

    def start(self, listener: Listener, token: str, endpoints: Sequence[tuple[str, int]]) -> None:
        """Starts the thread. ``token``: the group's secret, equal on all ranks; ``endpoints``:
        where each rank listens (host, port)."""
        self._listener = listener
        self._star.connect(token, endpoints)
        self._judge_anew()
        self._thread = threading.Thread(target=self._run, name="lossycoll-control", daemon=True)
        self._thread.start()

    def meet(self, timeout: float) -> bool:
        """Whether the hub and every other rank have heard each other, within ``timeout`` seconds.

        Before, what is told may not reach all. False at once when a rank died or gave up meanwhile:
        the listener has been told.
        """
        self._settled.wait(timeout)
        return self._all_heard

    def missing(self) -> list[int]:
        """The ranks that have not been heard yet, as far as this one can know."""
        if self._rank != 0:
            return [0]
        return [rank for rank in range(1, self._world) if rank not in self._star.routes]

    def abort(self, reason: str, kind: str) -> None:
        """Gives the group up, on all ranks; ``kind``: the name of the error's type."""
        self._post({"k": "abort", "reason": reason, "kind": kind})

    def waiting(self, seq: int, call: str) -> None:
        """Asks all ranks whether they mean the same by call number ``seq``."""
        self._post({"k": "waiting", "seq": seq, "call": call})

    def missed(self, rank: int) -> None:
        """``rank`` has left, and is needed: a group that outlives ranks goes on without it."""
        self._post({"k": "missed", "rank": rank})

    def group_figures(self, timeout: float = 1.0) -> dict[int, dict[str, Any]]:
        """The latest counters of each rank, as the hub knows them; waits at most ``timeout`` s."""
        if not self._is_hub:
            self._fresh.clear()
            self._post({"k": "ask"})
            self._fresh.wait(timeout)
        with self._lock:
            return dict(self._figures)

    def leave(self, seq: int, why: str = "") -> None:
        """Says goodbye to all ranks; ``seq``: the last call issued, ``why``: this rank's error."""
        self._post({"k": "bye", "seq": seq, "why": why})

    def close(self) -> None:
        """Joins the thread and frees the sockets. Idempotent, also where Ctrl-C has ended it."""
        with self._lock:
            stopped, self._stopping = self._stopping, True
            if self._thread is not None and not stopped:
                os.eventfd_write(self._wake, 1)
        if self._thread is None:
            if not stopped:
                self._release(0)
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: Message) -> None:
        with self._lock:
            if self._stopping:
                return
            self._outbox.append(message)
            os.eventfd_write(self._wake, 1)

    # ---- the thread ----

    @property
    def _is_hub(self) -> bool:
        return self._star.hub == self._rank

    def _run(self) -> None:
        assert self._listener is not None
        linger = LINGER_MS
        try:
            self._serve()
            linger = 0 if self._is_alone() else LINGER_MS
        except Exception as error:  # else nobody would ever learn of a death again
            self._listener.on_broken(error)
            with contextlib.suppress(Exception):
                self._flush()
            raise
        finally:
            with self._lock:
                self._stopping = True
            self._settled.set()
            self._release(linger)

    def _serve(self) -> None:
        poller = self._star.poller
        poller.register(self._wake, zmq.POLLIN)
        due = 0.0
        while not self._stopping:
            pause = max(0.0, due - self._clock())
            if self._suspects or self._expected or self._star.settling:
                pause = min(pause, PROBE_SECONDS[0])
            events = dict(poller.poll(int(pause * 1000) + 1))
            if self._wake in events:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            # Receive before judging: what has arrived while this thread had to wait is no silence.
            for message in self._star.receive():
                self._take(message)
            self._flush()
            now = self._clock()
            if due and now >= due:
                self._forgive(now, now - due)
            self._probe(now)
            if now >= due:
                self._beat()
                self._judge(now)
                self._ask(now)
                due = now + self._interval
        self._flush()

    def _is_alone(self) -> bool:
        """Whether the hub can't hear this one's goodbye. One that has said its own waits for it."""
        hub = self._star.hub
        return not self._is_hub and (
            hub in self._dead or (hub in self._gone and hub in self._star.ended((hub,)))
        )

    def _release(self, linger: int) -> None:
        self._star.close(linger)
        with self._lock:
            os.close(self._wake)

    def _flush(self) -> None:
        while self._outbox:
            message = {**self._outbox.popleft(), "r": self._rank}
            if self._is_hub:
                self._at_hub(message)
            elif message["k"] == "missed" and message["rank"] == self._star.hub:
                self._give_up(message["rank"], 0.0, ended=True)
            else:
                self._keep(message)
                self._star.send(message)

    def _beat(self) -> None:
        """Own counters to the hub, or a sign of life from it to all (figures only when asked)."""
        assert self._listener is not None
        figures = self._listener.figures()
        if self._is_hub:
            with self._lock:
                self._figures[self._rank] = figures
            self._relay({"k": "beat"})
        else:
            self._star.send({"k": "beat", "figures": figures})
        if self._survivors is not None and not self._survivors.agreed:
            self._agree()

    def _judge_anew(self) -> None:
        now = self._clock()
        judged = range(self._world) if self._is_hub else (self._star.hub,)
        self._heard = {rank: now for rank in judged if rank != self._rank}

    def _forgive(self, now: float, late: float) -> None:
        """Who slept itself (stopped, or without the GIL) can't tell how long others were silent."""
        if late > 2 * self._interval:
            for rank in self._heard:
                self._heard[rank] += late
        if late > self._silence - 2 * self._interval:
            self._woke = now

    def _judge(self, now: float) -> None:
        silent = {
            rank: now - heard
            for rank, heard in self._heard.items()
            if now - heard > self._silence and rank not in self._gone
        }
        if silent:
            ended = self._star.ended(silent)
            for rank, seconds in silent.items():
                self._give_up(rank, seconds, ended=rank in ended)
        hub = self._star.hub
        if self._hub_has_left and now - self._heard.get(hub, now) > self._silence:
            self._follow()

    def _ask(self, now: float) -> None:
        """Whose beats don't come may be late only since TCP waits after a cut."""
        late = [rank for rank, heard in self._heard.items() if now - heard > 2 * self._interval]
        self._star.ask([rank for rank in late if rank not in self._gone], self._interval / 4)

    def _probe(self, now: float) -> None:
        """A process that was killed leaves a broken connection, and nobody who listens."""
        for rank in self._star.disconnected():
            self._suspects.setdefault(rank, now)
        for looked_for in (self._suspects, self._expected):
            for rank, since in list(looked_for.items()):
                known = rank in self._gone and not (rank == self._star.hub and self._hub_has_left)
                if known or now - since > PROBE_SECONDS[1]:
                    del looked_for[rank]
        doubtful = {*self._suspects, *self._expected}
        ended = self._star.ended(doubtful) if doubtful else set()
        if ended:  # a goodbye that came meanwhile is the better reason
            for message in self._star.receive():
                self._take(message)
        for rank in ended - self._gone:
            self._give_up(rank, now - self._heard.get(rank, now), ended=True)
        if self._hub_has_left and self._star.hub in ended:
            self._follow()
        survivors = self._survivors
        if survivors is not None and not survivors.agreed and self._star.hub in self._expected:
            self._agree()  # it may not have known that it is the hub

    # ---- the next hub ----

    @property
    def _hub_has_left(self) -> bool:
        """In order. It is the hub until it ends, since it waits for the others' goodbyes."""
        return self._star.hub in self._gone - self._dead

    def _lowest(self) -> int:
        lost = self._survivors.lost if self._survivors is not None else set[int]()
        out = (self._gone | lost) - {self._rank}
        return min(rank for rank in range(self._world) if rank not in out)

    def _follow(self) -> None:
        """The hub is no more: the lowest rank takes its place."""
        self._star.follow(self._lowest())
        self._judge_anew()
        if (self._rank, "bye", 0) in self._kept:
            self._heard.clear()  # who leaves judges nobody: the rest follow another
        self._expected = {rank: at for rank, at in self._heard.items() if rank not in self._gone}
        if self._is_hub:
            self._briefed.clear()
            for rank in list(self._star.routes):
                self._brief(rank)
            return
        for message in list(self._kept.values()):
            if message["r"] == self._rank:
                self._star.send(message)
        self._star.send({"k": "beat"})  # so that the hub knows of this one at once

    def _brief(self, rank: int) -> None:
        """Tells a rank that is new here what it may have missed."""
        self._briefed.add(rank)
        for message in self._kept.values():
            if message["r"] != rank:
                self._star.send(message, rank)

    @staticmethod
    def _key(message: Message) -> tuple[Any, ...]:
        kind = message["k"]
        return message["r"], kind, message["seq"] if kind == "mismatch" else 0

    def _keep(self, message: Message) -> None:
        if message["k"] in KEPT:
            self._kept[self._key(message)] = message

    def _is_known(self, message: Message) -> bool:
        return message["k"] in KEPT and self._key(message) in self._kept

    # ---- ranks that are lost ----

    def _give_up(self, rank: int, silent: float, *, ended: bool = False) -> None:
        """This rank is sure that ``rank`` is lost; the hub's word is the others'."""
        if self._survivors is None and rank in self._gone:
            return
        if self._is_hub:
            told = {"k": "dead", "rank": rank, "silent": round(silent, 2), "ended": ended}
            self._kept[self._rank, "dead", rank] = {**told, "r": self._rank}
            self._relay(told)
        self._lose(rank, silent, ended)

    def _lose(self, rank: int, silent: float, ended: bool) -> None:
        assert self._listener is not None
        survivors = self._survivors
        self._gone.add(rank)
        self._dead.add(rank)
        if survivors is None or rank == self._rank or not self._all_heard:
            self._listener.on_dead(rank, silent, ended)
            self._settled.set()
            return
        # While this one slept, those that have ended since may have gone on without it.
        if not survivors.lose(rank, proven=ended and self._woke is None):
            return
        self._next = self._listener.on_lost(rank, silent, ended)
        self._stopped_at = self._clock()
        if self._star.hub in survivors.lost:
            self._follow()
        self._agree()

    def _agree(self) -> None:
        """Tells the hub where this rank stands; the hub decides when it knows that of all."""
        survivors = self._survivors
        assert survivors is not None
        assert self._listener is not None
        late = self._clock() - self._stopped_at > self._liveness
        if self._apart or late or not survivors.may_go_on():
            if not self._apart:
                self._listener.on_apart(sorted(survivors.lost), survivors.left)
            self._apart = True
            return
        survivors.told(self._rank, survivors.lost, self._next, survivors.views)
        if self._is_hub:
            for rank in survivors.left:
                if rank in self._gone:  # it left in order, and can't be asked any more
                    self._give_up(rank, 0.0, ended=True)
                    return
            if survivors.decide() is not None:
                self._relay({"k": "views", "views": _plain(survivors.views)})
                self._listener.on_views(survivors.views, survivors.agreed)
        elif self._star.hub in self._gone:
            self._give_up(self._star.hub, 0.0, ended=True)
        else:
            state = {"lost": sorted(survivors.lost), "next": self._next}
            self._star.send({"k": "state", **state, "views": _plain(survivors.views)})

    def _on_state(self, message: Message) -> None:
        survivors = self._survivors
        if survivors is None:
            return
        sender, lost = message["r"], {self._rank_in(rank) for rank in message["lost"]}
        views = _views(message["views"], self._world)
        news = lost - survivors.lost - {self._rank}
        if not self._is_hub:
            for rank in news:
                self._suspects.setdefault(rank, self._clock())
            return
        survivors.told(sender, lost, int(message["next"]), views)
        if news:  # a hub before this one gave them up, and didn't live to tell all
            ended = self._star.ended(news)
            for rank in news:
                self._give_up(rank, self._silence, ended=rank in ended)
        if survivors.agreed:  # the sender has missed the verdict
            self._star.send({"k": "views", "views": _plain(survivors.views)}, sender)
            return
        for rank in survivors.lost - lost:
            self._star.send(self._dead_already(rank), sender)
        self._agree()

    def _dead_already(self, rank: int) -> Message:
        assert self._survivors is not None
        ended = rank in self._survivors.proven
        return {"k": "dead", "rank": rank, "silent": round(self._silence, 2), "ended": ended}

    def _on_views(self, message: Message) -> None:
        survivors = self._survivors
        assert self._listener is not None
        if survivors is None or self._is_hub or message["r"] != self._star.hub:
            return
        views = _views(message["views"], self._world)
        if self._rank not in views[-1].members:
            self._listener.on_dead(self._rank, 0.0, False)
            return
        if survivors.learn(views):
            self._listener.on_views(survivors.views, survivors.agreed)

    # ---- messages ----

    def _take(self, message: Message) -> None:
        sender = message["r"]
        if sender in self._heard:
            now = self._heard[sender] = self._clock()
            self._expected.pop(sender, None)
            if self._woke is not None and now - self._woke > self._interval:
                self._woke = None
        if self._survivors is not None and sender in self._survivors.lost:
            if self._is_hub:  # it lives after all, but the others went on without it
                self._star.send(self._dead_already(sender), sender)
            return
        if message["k"] == "alive":
            if sender not in self._dead:
                self._star.answer(sender)
            return
        try:
            if self._is_hub:
                if sender not in self._briefed:
                    self._brief(sender)
                if not self._all_heard and len(self._star.routes) == self._world - 1:
                    self._all_heard = True
                    self._relay({"k": "all"})
                    self._settled.set()
                self._at_hub(message)
            elif sender == self._star.hub or message["k"] in RELAYED | {"state"}:
                self._deliver(message)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            self._star.foreign += 1

    def _at_hub(self, message: Message) -> None:
        """What concerns all goes on to all, and is taken in here."""
        kind, sender = message["k"], message["r"]
        if kind == "beat":
            with self._lock:
                self._figures[sender] = message.get("figures", {})
        elif kind == "ask" and sender == self._rank:  # it has become the hub meanwhile
            self._fresh.set()
        elif kind == "ask":
            with self._lock:
                figures = {str(rank): found for rank, found in self._figures.items()}
            self._star.send({"k": "figures", "figures": figures}, sender)
        elif kind == "missed":
            if self._rank_in(message["rank"]) in self._gone:
                self._give_up(message["rank"], 0.0, ended=True)
        elif kind == "state":
            self._on_state(message)
        elif kind in RELAYED and not self._is_known(message):
            self._relay(message, but=sender)
            if sender != self._rank:
                self._deliver(message)
            else:
                self._keep(message)

    def _deliver(self, message: Message) -> None:
        listener = self._listener
        assert listener is not None
        kind, sender = message["k"], message["r"]
        if self._is_known(message):
            return
        if kind == "dead":
            rank = self._rank_in(message["rank"])
            self._lose(rank, float(message["silent"]), bool(message["ended"]))
        elif kind == "abort":
            self._gone.add(sender)  # whether it lives on doesn't matter any more
            listener.on_abort(sender, str(message["reason"]), str(message["kind"]))
            self._settled.set()
        elif kind == "all":
            self._all_heard = True
            self._settled.set()
        elif kind == "bye":
            seq = int(message["seq"])
            self._gone.add(sender)
            listener.on_bye(sender, seq, str(message.get("why", "")))
            if self._survivors is not None and not self._survivors.agreed:
                self._agree()
        elif kind == "waiting":
            self._compare(sender, int(message["seq"]), str(message["call"]))
        elif kind == "mismatch":
            calls = {sender: str(message["call"]), int(message["rank"]): str(message["other"])}
            listener.on_mismatch(int(message["seq"]), calls)
        elif kind == "figures":
            with self._lock:
                self._figures = {int(r): found for r, found in message["figures"].items()}
            self._fresh.set()
        elif kind == "state":
            self._on_state(message)
        elif kind == "views":
            self._on_views(message)
        self._keep(message)

    def _rank_in(self, rank: Any) -> int:
        """Raises ValueError for what is no rank."""
        if not isinstance(rank, int) or not 0 <= rank < self._world:
            raise ValueError(f"rank is {rank!r}, wanted one of {self._world}")
        return rank

    def _compare(self, sender: int, seq: int, call: str) -> None:
        assert self._listener is not None
        mine = self._listener.call_at(seq)
        if mine is not None and mine != call:
            self._outbox.append(
                {"k": "mismatch", "seq": seq, "call": mine, "rank": sender, "other": call}
            )
            self._listener.on_mismatch(seq, {self._rank: mine, sender: call})
            os.eventfd_write(self._wake, 1)

    def _relay(self, message: Message, but: int = -1) -> None:
        for rank in list(self._star.routes):
            if rank != but:
                self._star.send(message, rank)


def _plain(views: Sequence[View]) -> list[list[Any]]:
    return [[view.first, list(view.members)] for view in views]


def _views(plain: Any, world: int) -> list[View]:
    """The other way round. Raises ValueError for what can't have been views of this group."""
    views = [View(int(first), tuple(int(rank) for rank in members)) for first, members in plain]
    ranks = set(range(world))
    if [view.first for view in views] != sorted(view.first for view in views):
        raise ValueError("the views are out of order")
    for view in views:
        if not view.members or not set(view.members) <= ranks:
            raise ValueError(f"members are {view.members}, wanted some of {world} ranks")
        ranks = set(view.members)
    if not views or views[0].first != 0 or len(views[0].members) != world:
        raise ValueError("the first view is not of all ranks")
    return views

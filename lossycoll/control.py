"""The control plane of a group: who lives, who gives up, who means something else.

A star over TCP (pyzmq): a ROUTER at rank 0, a DEALER at every other rank, one daemon thread per
group and rank. Messages are JSON objects that carry the group's token; anything else is counted
and dropped. Rank 0 judges the others' silence and tells all; the others judge rank 0's.

==========  ======================  ===========================================================
kind        fields                  meaning
==========  ======================  ===========================================================
beat        figures                 the sender lives; its counters
dead        rank, silent            rank 0 has declared that rank dead (silent: seconds)
abort       reason, kind            the sender gives the group up; the error's type
all         -                       from rank 0, once: it has heard every rank
bye         seq                     the sender leaves in order after call number seq
waiting     seq, call               the sender has waited for that call for a while
mismatch    seq, call, rank, other  the sender's call at seq is ``call``, rank's is ``other``
ask         -                       to rank 0: send me all figures
figures     figures                 from rank 0: the counters of all ranks
==========  ======================  ===========================================================

All but beat, all, ask and figures reach every rank, by way of rank 0, which can reach a rank once
it has heard it: so nobody goes on (:meth:`Control.meet`) before rank 0 has heard all.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections import deque
from typing import Any, Final, Protocol

import zmq

from .errors import RendezvousError

BEATS_PER_LIVENESS: Final = 8
SILENT_SHARE: Final = 0.7
"""Of the liveness time; the rest is for the verdict to reach every rank."""
LINGER_MS: Final = 500
BATCH: Final = 256
RELAYED: Final = frozenset({"dead", "abort", "bye", "waiting", "mismatch"})


class Listener(Protocol):
    """What the control plane tells and asks. Called from its thread: must be quick, never raise."""

    def on_dead(self, rank: int, silent: float) -> None: ...
    def on_abort(self, rank: int, reason: str, kind: str) -> None: ...
    def on_bye(self, rank: int, seq: int) -> None: ...
    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None: ...
    def call_at(self, seq: int) -> str | None: ...
    def figures(self) -> dict[str, Any]: ...


class Control:
    """One rank's end. ``open`` (rank 0), ``start``, ``meet``, ``leave``, ``close``.

    ``token``: the group's secret, equal on all ranks. ``liveness`` in seconds. World >= 2.
    """

    def __init__(self, rank: int, world: int, token: str, liveness: float) -> None:
        self._rank = rank
        self._world = world
        self.token = token
        self._interval = liveness / BEATS_PER_LIVENESS
        self._silence = liveness * SILENT_SHARE
        self._listener: Listener | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outbox: deque[dict[str, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lock = threading.Lock()
        # The rest belongs to the thread, apart from plain reads.
        self._routes: dict[int, bytes] = {}
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        """Those of ``_gone`` that didn't say goodbye."""
        self._endpoint = ("", 0)
        self._all_heard = False
        self._settled = threading.Event()
        self._figures: dict[int, dict[str, Any]] = {}
        self._fresh = threading.Event()
        self.foreign = 0
        """Messages dropped since they were malformed or without the token."""

    def open(self, address: str, ports: tuple[int, int] = (0, 0)) -> int:
        """Listens at rank 0 on ``address`` and a port of ``ports`` (first, last); 0: any.

        Returns the port. Raises RendezvousError when none can be had.
        """
        first, last = ports
        for port in range(first, last + 1):
            with contextlib.suppress(zmq.ZMQError):
                self._socket.bind(f"tcp://{_bracketed(address)}:{port or '*'}")
                endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(endpoint, bytes)
                return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        self.close()
        raise RendezvousError(
            f"rank 0/{self._world}: no free TCP port at {address} in {first}-{last}; widen "
            f"LOSSYCOLL_PORT_RANGE"
        )

    def start(self, listener: Listener, host: str, port: int) -> None:
        """Starts the thread; ``host`` and ``port`` are rank 0's."""
        if self._rank != 0:
            self._socket.connect(f"tcp://{_bracketed(host)}:{port}")
        self._endpoint = (host, port)
        self._listener = listener
        now = time.monotonic()
        judged = range(1, self._world) if self._rank == 0 else (0,)
        self._heard = dict.fromkeys(judged, now)
        self._thread = threading.Thread(target=self._run, name="lossycoll-control", daemon=True)
        self._thread.start()

    def meet(self, timeout: float) -> bool:
        """Whether rank 0 and every other rank have heard each other, within ``timeout`` seconds.

        Before, what is told may not reach all. False at once when a rank died or gave up meanwhile:
        the listener has been told.
        """
        self._settled.wait(timeout)
        return self._all_heard

    def missing(self) -> list[int]:
        """The ranks that have not been heard yet, as far as this one can know."""
        if self._rank != 0:
            return [0]
        return [rank for rank in range(1, self._world) if rank not in self._routes]

    def abort(self, reason: str, kind: str) -> None:
        """Gives the group up, on all ranks; ``kind``: the name of the error's type."""
        self._post({"k": "abort", "reason": reason, "kind": kind})

    def waiting(self, seq: int, call: str) -> None:
        """Asks all ranks whether they mean the same by call number ``seq``."""
        self._post({"k": "waiting", "seq": seq, "call": call})

    def group_figures(self, timeout: float = 1.0) -> dict[int, dict[str, Any]]:
        """The latest counters of each rank, as rank 0 knows them; waits at most ``timeout`` s."""
        if self._rank != 0:
            self._fresh.clear()
            self._post({"k": "ask"})
            self._fresh.wait(timeout)
        with self._lock:
            return dict(self._figures)

    def leave(self, seq: int) -> None:
        """Says goodbye to all ranks; ``seq``: the last call issued."""
        self._post({"k": "bye", "seq": seq})

    def close(self) -> None:
        """Joins the thread and frees the sockets. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
        if self._thread is None:
            self._release(0)
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._stopping:
                return
            self._outbox.append(message)
            os.eventfd_write(self._wake, 1)

    # ---- the thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = 0.0
        while not self._stopping:
            pause = max(0.0, due - time.monotonic())
            events = dict(poller.poll(int(pause * 1000) + 1))
            if self._wake in events:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            # Receive before judging: what has arrived while this thread had to wait is no silence.
            self._receive()
            self._flush()
            now = time.monotonic()
            if now >= due:
                if due:
                    self._forgive(now - due)
                self._beat()
                self._judge(now)
                due = now + self._interval
        self._flush()
        self._release(0 if self._rank != 0 and self._is_alone() else LINGER_MS)

    def _is_alone(self) -> bool:
        """Whether rank 0 can't hear this one's goodbye. One that has said its own waits for it."""
        return 0 in self._dead or (0 in self._gone and not reachable(*self._endpoint, 0.2))

    def _release(self, linger: int) -> None:
        self._socket.close(linger)
        self._context.term()
        with self._lock:
            os.close(self._wake)

    def _flush(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            message["r"] = self._rank
            if self._rank == 0:
                self._hub(message)
            else:
                self._send(message)

    def _beat(self) -> None:
        """Own counters to rank 0, or a sign of life from it to all (figures only when asked)."""
        assert self._listener is not None
        figures = self._listener.figures()
        if self._rank == 0:
            with self._lock:
                self._figures[0] = figures
            self._relay({"k": "beat", "r": 0}, but=0)
        else:
            self._send({"k": "beat", "r": self._rank, "figures": figures})

    def _forgive(self, late: float) -> None:
        """Who slept itself (stopped, or without the GIL) can't tell how long others were silent."""
        if late > 2 * self._interval:
            for rank in self._heard:
                self._heard[rank] += late

    def _judge(self, now: float) -> None:
        assert self._listener is not None
        for rank, heard in self._heard.items():
            silent = now - heard
            if silent > self._silence and rank not in self._gone:
                self._gone.add(rank)
                self._dead.add(rank)
                message = {"k": "dead", "r": self._rank, "rank": rank, "silent": round(silent, 2)}
                if self._rank == 0:
                    self._hub(message)
                else:
                    self._deliver(message)

    # ---- messages ----

    def _receive(self) -> None:
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._parse(frames[-1])
            if message is None:
                self.foreign += 1
                continue
            sender = message["r"]
            if self._rank == 0:
                self._routes[sender] = frames[0]
                self._heard[sender] = time.monotonic()
                if not self._all_heard and len(self._routes) == self._world - 1:
                    self._relay({"k": "all", "r": 0}, but=0)
                    self._all_heard = True
                    self._settled.set()
                self._hub(message)
            else:
                self._heard[0] = time.monotonic()
                self._deliver(message)

    def _parse(self, body: bytes) -> dict[str, Any] | None:
        """The message, or None if it isn't one of this group's."""
        try:
            message = json.loads(body)
            token = message["t"].encode()
            sender = message["r"]
            known = isinstance(sender, int) and 0 <= sender < self._world and sender != self._rank
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        good = known and isinstance(message.get("k"), str)
        return message if good and hmac.compare_digest(token, self.token.encode()) else None

    def _hub(self, message: dict[str, Any]) -> None:
        """Rank 0: what concerns all goes on to all, and is taken in here."""
        kind, sender = message["k"], message["r"]
        if kind == "beat":
            with self._lock:
                self._figures[sender] = message.get("figures", {})
        elif kind == "ask":
            with self._lock:
                figures = {str(rank): found for rank, found in self._figures.items()}
            self._send({"k": "figures", "r": 0, "figures": figures}, sender)
        elif kind in RELAYED:
            self._relay(message, but=sender)
            if sender != 0 or kind == "dead":
                self._deliver(message)

    def _deliver(self, message: dict[str, Any]) -> None:
        listener = self._listener
        assert listener is not None
        kind, sender = message["k"], message["r"]
        try:
            if kind == "dead":
                self._gone.add(message["rank"])
                self._dead.add(message["rank"])
                listener.on_dead(int(message["rank"]), float(message["silent"]))
                self._settled.set()
            elif kind == "abort":
                listener.on_abort(sender, str(message["reason"]), str(message["kind"]))
                self._settled.set()
            elif kind == "all":
                self._all_heard = True
                self._settled.set()
            elif kind == "bye":
                self._gone.add(sender)
                listener.on_bye(sender, int(message["seq"]))
            elif kind == "waiting":
                self._compare(sender, int(message["seq"]), str(message["call"]))
            elif kind == "mismatch":
                calls = {sender: str(message["call"]), int(message["rank"]): str(message["other"])}
                listener.on_mismatch(int(message["seq"]), calls)
            elif kind == "figures":
                with self._lock:
                    self._figures = {int(r): found for r, found in message["figures"].items()}
                self._fresh.set()
        except (KeyError, TypeError, ValueError):
            self.foreign += 1

    def _compare(self, sender: int, seq: int, call: str) -> None:
        assert self._listener is not None
        mine = self._listener.call_at(seq)
        if mine is not None and mine != call:
            self._outbox.append(
                {"k": "mismatch", "seq": seq, "call": mine, "rank": sender, "other": call}
            )
            self._listener.on_mismatch(seq, {self._rank: mine, sender: call})
            os.eventfd_write(self._wake, 1)

    def _relay(self, message: dict[str, Any], but: int) -> None:
        for rank in list(self._routes):
            if rank != but:
                self._send(message, rank)

    def _send(self, message: dict[str, Any], rank: int = 0) -> None:
        """To rank 0, or from rank 0 to ``rank``. A broken connection loses it: silence tells."""
        body = json.dumps({**message, "t": self.token}).encode()
        frames = [self._routes[rank], body] if self._rank == 0 else [body]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, zmq.NOBLOCK)


def reachable(host: str, port: int, timeout: float = 1.0) -> bool:
    """Whether something listens there: rank 0 of a group that still runs."""
    try:
        with socket.create_connection((host, port), timeout):
            return True
    except OSError:
        return False


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address

"""Point to point of a group: sends and receives over TCP connections between the ranks.

Small messages go at once. Larger ones are announced, and go when a receive wants them: so memory
is bounded, and the bytes travel from tensor to tensor. docs/messages.md has the protocol.

Long because posting, receiving frames, timeouts and failures change the same transfers,
connections and mailbox, under one lock.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from lossycoll.errors import (
    AbortedError,
    ClosedError,
    LossyError,
    MismatchError,
    OperationTimeout,
    PeerLostError,
)
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.membership.group_state import Health

from .connection import EAGER_BYTES, Frame, Kind, Malformed, Stream
from .matching import Mailbox
from .peer_state import CHARGE_BYTES, WINDOW_BYTES, Arrival, Hello, Peer, listen
from .progress import Events, Pump
from .request import Transfer

TIMER_SECONDS: Final = 0.1
HELLO_SECONDS: Final = 5.0
"""How long a connection may take to say whose it is."""
STRANGERS: Final = 128
"""Connections that haven't said whose they are; of more, the oldest are closed."""
FLUSH_SECONDS: Final = 1.0

_Item = TypeVar("_Item")


class Messages:
    """One rank's end. ``start``, then sends and receives, then ``flush`` and ``close``.

    ``token``: the group's secret, equal on all ranks. Listens on ``address`` and a port of
    ``ports`` (first, last; (0, 0) is any), which is ``port`` from then on. World >= 2.
    Raises RendezvousError when there is no such port.
    """

    def __init__(
        self, rank: int, world: int, *, token: str, address: str, ports: tuple[int, int]
    ) -> None:
        self._rank = rank
        self._token = token.encode()
        self._pid = os.getpid()
        self._listener = listen(rank, world, address, ports)
        self.port = int(self._listener.getsockname()[1])
        self.foreign = 0
        """Connections dropped since they spoke something else, or were not of this group."""
        self._lock = threading.Lock()
        # All below belongs to whoever has the lock, apart from plain reads.
        self._health: Health | None = None
        self._liveness = 0.0
        self._addresses: Sequence[tuple[str, int]] = ()
        self._peers = [Peer(other) for other in range(world)]
        self._mailbox: Mailbox[Arrival, Transfer] = Mailbox()
        self._pending: dict[Transfer, None] = {}
        self._streams: dict[int, Stream] = {}
        self._strangers: dict[Stream, float] = {}
        self._filling: dict[Stream, Transfer | Arrival | Hello | None] = {}
        self._unsent: set[Stream] = set()
        self._ended: LossyError | None = None
        self._pump: Pump | None = None
        self._next_timer = 0.0
        # What is to be done once the lock is free.
        self._verdicts: list[LossyError] = []
        self._callbacks: list[Callable[[], None]] = []

    def start(self, health: Health, liveness: float, addresses: Sequence[Sequence[Any]]) -> None:
        """``addresses``: host and port by rank. ``liveness`` in seconds."""
        self._health = health
        self._liveness = liveness
        self._addresses = [(str(host), int(port)) for host, port in addresses]

    # ---- sends and receives ----

    def send(
        self,
        call: Collective,
        memory: memoryview,
        peer: int,
        tag: int,
        *,
        keep: object,
        timeout: float,
    ) -> Transfer:
        """Sends the bytes of ``memory`` to rank ``peer``. Done when ``memory`` may change again.

        ``timeout`` in seconds. Raises PeerLostError if that rank is known to be gone.
        """
        transfer = Transfer(self, call, memory, is_send=True, peer=peer, tag=tag, keep=keep)
        self._guarded(lambda: self._post(transfer, timeout))
        return transfer

    def receive(
        self,
        call: Collective,
        memory: memoryview,
        peer: int | None,
        tag: int,
        *,
        keep: object,
        timeout: float,
        finish: Callable[[], None] | None = None,
    ) -> Transfer:
        """Fills ``memory`` with the next message of ``tag`` from ``peer`` (None: from any rank)."""
        transfer = Transfer(
            self, call, memory, is_send=False, peer=peer, tag=tag, keep=keep, finish=finish
        )
        self._guarded(lambda: self._post(transfer, timeout))
        return transfer

    def _post(self, transfer: Transfer, timeout: float) -> None:
        assert self._health is not None
        gone = self._ended
        if gone is None and transfer.peer is not None:
            gone = self._peers[transfer.peer].lost
            if gone is None and transfer.is_send:
                gone = self._health.left(transfer.peer)
        if gone is not None:
            raise gone.again(transfer.call.numbered)
        if self._pump is None:
            self._pump = Pump(self._handle, self._is_busy)
            self._pump.watch(self._listener.fileno(), writable=False, new=True)
        transfer.timeout = timeout
        transfer.deadline = time.monotonic() + timeout
        self._pending[transfer] = None
        if transfer.is_send:
            self._post_send(transfer)
        else:
            self._post_receive(transfer)
        if self._pending or self._unsent:
            self._pump.wake()

    def _is_busy(self) -> bool:
        return bool(self._pending or self._unsent or self._callbacks)

    def _post_send(self, transfer: Transfer) -> None:
        assert transfer.peer is not None
        peer = self._peers[transfer.peer]
        size = len(transfer.memory)
        charge = size + CHARGE_BYTES
        if size <= EAGER_BYTES and peer.window < charge and peer.outbound is not None:
            self._serve(peer.outbound, readable=True)  # it may have told of more room meanwhile
        eager = size <= EAGER_BYTES and peer.window >= charge
        stream = self._connection(peer)
        if stream is None:
            return
        kind = Kind.EAGER if eager else Kind.ANNOUNCE
        frame = Frame(kind, transfer.tag, peer.sent, transfer.elements, size, transfer.dtype)
        peer.sent += 1
        if not eager:
            peer.announced[frame.number] = transfer
            self._write(stream, frame)
            return
        peer.window -= charge
        if self._write(stream, frame, transfer.memory):
            self._finish(transfer)

    def _post_receive(self, transfer: Transfer) -> None:
        arrival = self._mailbox.post(transfer.peer, transfer.tag, transfer)
        if arrival is None or not self._fits(transfer, arrival.source, arrival.frame):
            return
        peer = self._peers[arrival.source]
        if arrival.data is None:
            self._grant(peer, arrival.frame.number, transfer)
            return
        self._consume(peer, arrival.frame)
        arrival.receive = transfer
        if arrival.complete:
            self._hand_over(arrival)

    def _hand_over(self, arrival: Arrival) -> None:
        if arrival.receive is not None and not arrival.receive.done and arrival.data is not None:
            arrival.receive.memory[:] = arrival.data
            self._finish(arrival.receive)

    def _fits(self, receive: Transfer, source: int, frame: Frame) -> bool:
        """Whether the message is what is expected; if it isn't the group ends."""
        receive.peer = source
        sent = (frame.dtype, frame.elements, frame.nbytes)
        if sent == (receive.dtype, receive.elements, len(receive.memory)):
            return True
        assert self._health is not None
        where = self._health.where
        self._verdicts.append(
            MismatchError(
                f"{where}: {receive.call.numbered}: {where.peer(source)} sends "
                f"{frame.dtype}[{frame.elements}] with tag {frame.tag} where "
                f"{receive.dtype}[{receive.elements}] is expected here; make dtype and number of "
                f"elements of both calls agree, and the order of those with the same tag",
                peer=source,
            )
        )
        return False

    def _grant(self, peer: Peer, number: int, receive: Transfer) -> None:
        peer.granted[number] = receive
        if peer.inbound is not None:
            self._write(peer.inbound, Frame(Kind.GRANT, number=number))

    def _consume(self, peer: Peer, frame: Frame) -> None:
        """Gives back the room of a small message; several at a time."""
        peer.held -= frame.nbytes + CHARGE_BYTES
        peer.consumed += frame.nbytes + CHARGE_BYTES
        if peer.consumed >= WINDOW_BYTES // 4 and peer.inbound is not None:
            self._write(peer.inbound, Frame(Kind.CREDIT, nbytes=peer.consumed))
            peer.consumed = 0

    def _finish(self, transfer: Transfer, error: LossyError | None = None) -> None:
        if not transfer.done:
            self._pending.pop(transfer, None)
            self._callbacks += transfer.end(error)

    # ---- waiting ----

    def wait(self, transfer: Transfer, timeout: float | None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        pump = self._pump
        while not transfer.done:
            assert pump is not None
            if time.monotonic() >= end:
                assert self._health is not None
                raise OperationTimeout(
                    f"{self._health.where}: {transfer.call.numbered}: not done after the "
                    f"{timeout:g} s given to wait()",
                    peer=transfer.peer,
                )
            pump.drive(transfer, end)

    def poll(self, transfer: Transfer) -> bool:
        if self._pump is not None:
            self._pump.glance()
        return transfer.done

    def on_done(self, transfer: Transfer, callback: Callable[[], None]) -> None:
        with self._lock:
            if not transfer.done:
                transfer.callbacks.append(callback)
                return
        callback()

    # ---- what must not be left half done ----

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs ``work`` with the lock. An interrupt in the middle of it ends the group, since
        nobody could tell what has been sent and received."""
        try:
            with self._lock:
                try:
                    work()
                except LossyError:
                    raise
                except BaseException as error:
                    assert self._health is not None
                    text = f"interrupted in the middle of a message: {error!r}"
                    where = self._health.where
                    self._verdicts.append(AbortedError(f"{where}: {text}", peer=self._rank))
                    raise
        finally:
            self._settle()

    def _settle(self) -> None:
        """Tells others, who may call back."""
        while self._verdicts and (verdict := _first(self._verdicts)) is not None:
            assert self._health is not None
            self._health.fail(verdict, tell=True)
        while self._callbacks and (callback := _first(self._callbacks)) is not None:
            callback()

    # ---- connections ----

    def _connection(self, peer: Peer) -> Stream | None:
        """To ``peer``; None if it is broken, and then the control plane will say why."""
        if peer.outbound is not None or peer.broken:
            return peer.outbound
        host, port = self._addresses[peer.rank]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        stream = Stream(sock, peer=peer.rank, outbound=True)
        with contextlib.suppress(BlockingIOError):
            sock.connect((host, port))
        peer.outbound = stream
        self._add(stream)
        token = memoryview(self._token)
        hello = Frame(Kind.HELLO, self._rank, peer.rank, nbytes=len(token))
        self._write(stream, hello, token)
        return stream

    def _add(self, stream: Stream) -> None:
        assert self._pump is not None
        self._streams[stream.fileno()] = stream
        self._pump.watch(stream.fileno(), writable=not stream.connected, new=True)

    def _accept(self) -> None:
        for _ in range(STRANGERS):
            try:
                sock, _address = self._listener.accept()
            except OSError:
                return
            stream = Stream(sock)
            self._strangers[stream] = time.monotonic()
            self._add(stream)
            self._serve(stream, readable=True)
            if len(self._strangers) > STRANGERS:
                self._drop(next(iter(self._strangers)), "too many strangers")

    def _write(self, stream: Stream, frame: Frame, data: memoryview | None = None) -> bool:
        return self._try(stream, lambda: stream.write(frame, data))

    def _serve(self, stream: Stream, *, readable: bool = False, writable: bool = False) -> bool:
        def serve() -> None:
            if writable:
                if not stream.connected:
                    stream.finish_connecting()
                stream.flush()
            if readable:
                stream.read(self)

        return self._try(stream, serve)

    def _try(self, stream: Stream, use: Callable[[], None]) -> bool:
        """Whether the stream is still good after it was used."""
        try:
            use()
        except Malformed:
            self._drop(stream, "it sent what is not of the protocol", foreign=True)
        except (OSError, EOFError) as error:
            self._drop(stream, str(error) or "closed by the other side")
        if stream.fileno() < 0:
            return False
        if stream.unsent != (stream in self._unsent) or not stream.connected:
            assert self._pump is not None
            (self._unsent.add if stream.unsent else self._unsent.discard)(stream)
            self._pump.watch(stream.fileno(), writable=stream.unsent)
        return True

    def _drop(self, stream: Stream, reason: str, *, foreign: bool = False) -> None:
        if self._streams.pop(stream.fileno(), None) is None:
            return
        if self._pump is not None:
            self._pump.unwatch(stream.fileno())
        stream.close()
        stranger = self._strangers.pop(stream, None) is not None
        self._filling.pop(stream, None)
        self._unsent.discard(stream)
        self.foreign += foreign or stranger
        if stranger or stream.peer < 0:
            return
        peer = self._peers[stream.peer]
        if stream.outbound:
            peer.outbound = None
        else:
            peer.inbound = None
        if not peer.broken:
            peer.broken = reason
            peer.broken_since = time.monotonic()

    def _handle(self, events: Events) -> None:
        if events or time.monotonic() >= self._next_timer:
            self._guarded(lambda: self._handle_all(events))

    def _handle_all(self, events: Events) -> None:
        if self._ended is not None:
            return
        for descriptor, mask in events:
            stream = self._streams.get(descriptor)
            if stream is not None:
                self._serve(stream, readable=bool(mask & ~4), writable=bool(mask & 4))
            elif descriptor == self._listener.fileno():
                self._accept()
        now = time.monotonic()
        if now >= self._next_timer:
            self._next_timer = now + TIMER_SECONDS
            self._judge(now)

    # ---- frames (connection.py's Reader) ----

    def on_frame(self, stream: Stream, frame: Frame) -> memoryview | None:
        if stream.peer < 0:
            return self._on_hello(stream, frame)
        peer = self._peers[stream.peer]
        if stream.outbound:
            self._on_reply(peer, stream, frame)
            return None
        if frame.kind == Kind.DATA:
            receive = peer.granted.pop(frame.number, None)
            if receive is None or frame.nbytes != len(receive.memory):
                raise Malformed
            self._filling[stream] = receive
            return receive.memory
        return self._on_message(peer, stream, frame)

    def _on_hello(self, stream: Stream, frame: Frame) -> memoryview:
        good = frame.kind == Kind.HELLO and frame.nbytes == len(self._token)
        known = 0 <= frame.tag < len(self._peers) and frame.tag != self._rank
        if stream in self._filling or not (good and known) or frame.number != self._rank:
            raise Malformed
        hello = Hello(frame.tag, bytearray(frame.nbytes))
        self._filling[stream] = hello
        return memoryview(hello.token)

    def _on_reply(self, peer: Peer, stream: Stream, frame: Frame) -> None:
        if frame.kind == Kind.GRANT and frame.number in peer.announced:
            transfer = peer.announced.pop(frame.number)
            data = Frame(Kind.DATA, number=frame.number, nbytes=len(transfer.memory))
            stream.write(data, transfer.memory, lambda: self._finish(transfer))
        elif frame.kind == Kind.CREDIT and frame.nbytes <= WINDOW_BYTES - peer.window:
            peer.window += frame.nbytes
        else:
            raise Malformed

    def _on_message(self, peer: Peer, stream: Stream, frame: Frame) -> memoryview | None:
        eager = frame.kind == Kind.EAGER
        if not (eager or frame.kind == Kind.ANNOUNCE) or frame.number != peer.heard:
            raise Malformed
        if eager:
            peer.held += frame.nbytes + CHARGE_BYTES
            if frame.nbytes > EAGER_BYTES or peer.held > WINDOW_BYTES:
                raise Malformed
        peer.heard += 1
        arrival = Arrival(peer.rank, frame)
        receive = self._mailbox.arrive(peer.rank, frame.tag, arrival)
        if receive is not None and not self._fits(receive, peer.rank, frame):
            receive = None  # the group has ended; what follows must go somewhere all the same
        elif receive is not None and eager:
            self._consume(peer, frame)
            self._filling[stream] = receive
            return receive.memory
        elif receive is not None:
            self._grant(peer, frame.number, receive)
        if arrival.data is None:
            return None
        self._filling[stream] = arrival
        return memoryview(arrival.data)

    def on_filled(self, stream: Stream) -> None:
        target = self._filling.pop(stream, None)
        if isinstance(target, Transfer):
            self._finish(target)
        elif isinstance(target, Arrival):
            target.complete = True
            self._hand_over(target)
        elif target is not None:
            peer = self._peers[target.rank]
            free = peer.inbound is None and not peer.broken and peer.lost is None
            if not (hmac.compare_digest(target.token, self._token) and free):
                raise Malformed
            stream.peer = target.rank
            peer.inbound = stream
            del self._strangers[stream]

    # ---- what time tells ----

    def _judge(self, now: float) -> None:
        for stream, since in list(self._strangers.items()):
            if now - since > HELLO_SECONDS:
                self._drop(stream, "it never said whose it is")
        for transfer in self._pending:
            if now >= transfer.deadline:
                self._verdicts.append(self._overdue(transfer))
                return
        for peer in self._peers:
            self._judge_peer(peer, now)

    def _judge_peer(self, peer: Peer, now: float) -> None:
        health = self._health
        assert health is not None
        left = health.left(peer.rank)
        if peer.lost is not None:
            self._give_up(peer, peer.lost, now)  # also what was posted since, for any rank
        elif left is not None and not peer.left_since:
            peer.left_since = now  # what it sent before is read first
        elif left is not None:
            self._give_up(peer, left, now)
        elif peer.broken and now - peer.broken_since > 2 * self._liveness and self._needs(peer):
            # By now the control plane would know of a death, and the group have gone on.
            text = (
                f"{health.where}: the connection with {health.where.peer(peer.rank)} broke though "
                f"all ranks are alive: {peer.broken}; look for a firewall between the two"
            )
            self._verdicts.append(PeerLostError(text, peer=peer.rank))

    def _needs(self, peer: Peer) -> bool:
        return any(transfer.peer == peer.rank for transfer in self._pending)

    def _overdue(self, transfer: Transfer) -> LossyError:
        assert self._health is not None
        where = self._health.where
        if transfer.peer is None:
            what = "no rank sent anything with this tag"
        else:
            verb = "took it" if transfer.is_send else "sent it"
            what = f"{where.peer(transfer.peer)} never {verb}"
        return OperationTimeout(
            f"{where}: {transfer.call.numbered}: {what} within {transfer.timeout:g} s; is the "
            f"other side stuck, still computing or at another tag? a longer timeout is given to "
            f"init_process_group or new_group",
            peer=transfer.peer,
        )

    def _give_up(self, peer: Peer, error: LossyError, now: float) -> None:
        """Ends what waits for a rank that is gone; receives from any source if all others are."""
        receives = peer.has_sent_all(now)
        alone = all(other.has_sent_all(now) for other in self._peers if other.rank != self._rank)
        for transfer in list(self._pending):
            if transfer.peer is None:
                over = alone
            else:
                over = transfer.peer == peer.rank and (transfer.is_send or receives)
            if over:
                self._finish(transfer, error)
        self._mailbox.forget(lambda receive: receive.done)

    # ---- the end ----

    def peer_lost(self, rank: int, error: LossyError) -> None:
        """Rank ``rank`` is gone and the group goes on: what waits for it, and whatever is posted
        for it later, ends with ``error``."""
        with self._lock:
            self._lose(self._peers[rank], error)
            self._next_timer = 0.0
        # Callbacks are not for the control plane's thread, whose beats would stop meanwhile.
        if self._pump is not None:
            self._pump.wake()

    def _lose(self, peer: Peer, error: LossyError) -> None:
        peer.lost = error
        for stream in (peer.inbound, peer.outbound):
            if stream is not None:
                self._drop(stream, str(error))
        self._mailbox.drop(peer.rank)
        self._give_up(peer, error, time.monotonic())

    def fail(self, error: LossyError) -> None:
        """The group has failed: ends all that is pending, here and with the others."""
        self._guarded(lambda: self._stop(error))

    def _stop(self, error: LossyError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        for stream in list(self._streams.values()):
            self._drop(stream, str(error))
        if self._pump is not None:
            self._pump.unwatch(self._listener.fileno())
        self._listener.close()
        for transfer in list(self._pending):
            self._finish(transfer, error)

    def flush(self) -> None:
        """Waits a little until the other ranks have all that was sent: before the goodbye, so that
        they know that nothing else will come."""
        end = time.monotonic() + FLUSH_SECONDS
        while self._pump is not None and os.getpid() == self._pid:
            with self._lock:
                streams = [stream for stream in self._streams.values() if stream.outbound]
                if not any(stream.unconfirmed() for stream in streams) or time.monotonic() > end:
                    for stream in streams:
                        stream.end()
                    return
            self._pump.glance()
            time.sleep(0.001)

    def close(self) -> None:
        """Joins the thread and frees the sockets. Idempotent."""
        if os.getpid() != self._pid:
            return
        where = "" if self._health is None else f"{self._health.where}: "
        error = ClosedError(f"{where}the group was destroyed before the operation ended")
        self._guarded(lambda: self._stop(error))
        if self._pump is not None:
            self._pump.stop()
            self._pump.join()
            self._pump = None  # each refers to the other


def _first(items: list[_Item]) -> _Item | None:
    """Takes out the first; None if another thread was quicker to take the last."""
    try:
        return items.pop(0)
    except IndexError:
        return None

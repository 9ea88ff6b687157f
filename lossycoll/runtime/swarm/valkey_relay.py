"""A swarm that meets by a valkey server: no peer listens on a port.

Each peer connects with the server alone. What it says goes through there to the directory, which
runs in the peer whose notice stands under the swarm's key (valkey_server.py). If that one goes,
another peer's begins, and peers turn to it as they do to a directory that takes over.

Whoever can write to the server can put frames among a connection's. With a secret those don't open:
they are counted and left out, and the connection goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Set
from typing import Final

from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import LONGEST
from lossycoll.runtime.keys import aead
from lossycoll.runtime.keys.secret import Secret

from .directory import LEASE, Directory
from .protocol import MOST_PEERS, Leave
from .service import STRANGERS, DirectoryService, PeerSession
from .valkey_server import Claimed, Notice, Notices, Subscription, ValkeyServer, ValkeyUrl

BEGIN_SECONDS: Final = 0.9
"""For which a newcomer that finds no swarm looks again before it begins one: if the server has
started again, those that were in it come first."""
LOOK_SECONDS: Final = 0.2  # after which a thread looks whether its connection has been closed
RENEW_SECONDS: Final = 1.0
"""Between two renewals of the notice, at which peers that have gone are found, too."""
AT_ONCE: Final = 2 * MOST_PEERS
"""Frames that are taken before groups are formed: whoever has said that it is ready isn't late."""
ANSWERED_AT_ONCE: Final = 128  # frames that are taken before answers go
INCARNATION_BYTES: Final = 16
NONCE_BYTES: Final = 16
MOST_WAITING: Final = 4096
"""Frames that have come and nobody has read; of more, the connection is given up."""
log: Final = logging.getLogger("lossycoll")


class RelayedConnection:
    """A :class:`.directory_transport.Connection` of relayed frames. Another thread may :meth:`put`
    what comes. ``send``: sends a frame; False: the other end isn't there. ``key``: ``KEY_BYTES``
    that both ends have; None: all is in clear. ``counts``: of what came and isn't believed, by why.
    ``connects``: this end has made the connection."""

    reached = True

    def __init__(
        self,
        send: Callable[[bytes], bool],
        key: bytes | None,
        counts: Counter[str],
        *,
        connects: bool,
    ) -> None:
        self.broken = ""
        self._send, self._counts = send, counts
        self._key, self._connects = key, connects
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = key is None  # the nonce
        self._keys: tuple[bytes, bytes] | None = None
        """To send and to receive with, once the other end's nonce has come."""
        self._sent = self._opened = 0
        self._waiting: list[bytes] = []  # messages to send from then on
        self._came: deque[bytes] = deque()

    def put(self, frame: bytes) -> None:
        if len(self._came) >= MOST_WAITING:
            self.broken = "what came isn't read"
        elif len(frame) > LONGEST + aead.TAG_BYTES:
            self._counts["malformed"] += 1
        else:
            self._came.append(frame)

    def read(self) -> list[bytes]:
        found = []
        while self._came:
            text = self._open(self._came.popleft())
            if text is not None:
                found.append(text)
        return found

    def _open(self, frame: bytes) -> bytes | None:
        if self._key is None:
            return frame
        if self._keys is None and len(frame) == NONCE_BYTES:
            self._take_nonce(self._key, frame)
            return None
        text = None
        if self._keys is not None:
            text = aead.open_sealed(self._keys[1], _iv(self._opened), frame)
        self._opened += text is not None
        self._counts["forged"] += text is None
        return text

    def _take_nonce(self, key: bytes, nonce: bytes) -> None:
        both = self._nonce + nonce if self._connects else nonce + self._nonce
        there, back = (
            hmac.digest(key, direction + both, hashlib.sha256) for direction in (b"there", b"back")
        )
        self._keys = (there, back) if self._connects else (back, there)
        self._say_nonce()
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            self.write(body)

    def write(self, body: bytes) -> None:
        self._say_nonce()
        if self._key is None:
            self._give(body)
        elif self._keys is None:
            self._waiting.append(body)
        else:
            self._sent += 1
            self._give(aead.seal(self._keys[0], _iv(self._sent - 1), body))

    def _say_nonce(self) -> None:
        if not self._said:
            self._said = True
            self._give(self._nonce)

    def _give(self, frame: bytes) -> None:
        if not self.broken and not self._send(frame):
            self.broken = "the other end isn't there"

    def finish(self) -> None:
        """The other end hears it by a message."""

    def close(self) -> None:
        """This end has nothing to close."""


def _iv(number: int) -> bytes:
    return number.to_bytes(aead.IV_BYTES, "big")


class ValkeyRelay:
    """Transport of one peer by a valkey server, until ``close``. ``secret``: the swarm's; None: all
    is in clear. OptionError: the package ``valkey`` isn't there."""

    def __init__(self, address: ValkeyUrl, secret: Secret | None) -> None:
        self._server = ValkeyServer(address)
        self._notices = Notices(self._server, address.prefix, secret)
        self._directory: RelayedDirectory | None = None
        self._alone_since: float | None = None
        """When no swarm was found for the first time; None: one was."""
        self.counts = self._notices.counts
        self._came = threading.Event()

    def reach(self, place: Address, session: str) -> _ClientConnection:
        """This peer may open the directory."""
        if self._directory is not None and self._directory.over:
            self._end_directory()
        now = time.monotonic()
        alone = self._alone_since
        found = self._notices.claim(session, alone is not None and now - alone >= BEGIN_SECONDS)
        if found is None:
            self._alone_since = now if alone is None else alone
            raise OSError("no peer's directory serves there yet")
        self._alone_since = None
        if found.own:
            self._end_directory()  # another one of this very peer's, which was silent
            self._directory = RelayedDirectory(self._notices, found)
        return _ClientConnection(self._notices, found.notice.inbox, self.wake)

    def wait(self, seconds: float) -> None:
        self._came.wait(seconds)
        self._came.clear()

    def wake(self) -> None:
        self._came.set()

    def end(self) -> None:
        """The peer has closed its connection already."""

    def close(self) -> None:
        self._end_directory()
        self._server.close()

    def _end_directory(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None


class _ClientConnection(RelayedConnection):
    """A peer's end, with a thread that takes what comes. ``wake``: called by the thread when
    something has come, or it has broken."""

    def __init__(
        self, notices: Notices, inbox: str, wake: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(self._publish, notices.frames_key, notices.counts, connects=True)
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._wake = wake
        self._server = notices.server
        self._inbox = notices.channel(inbox)
        channel = notices.channel(self.incarnation.hex())
        self._subscription: Subscription = self._server.listen(channel, notices.news)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="lossycoll-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.join()
            self._subscription.close()

    def _publish(self, frame: bytes) -> bool:
        try:
            return not self._server.publish([(self._inbox, self.incarnation + frame)])
        except OSError:
            return False

    def _listen(self) -> None:
        try:
            while not self._closed:
                frame = self._subscription.get(LOOK_SECONDS)
                if frame:
                    self.put(frame)
                    self._wake()
                # Whoever says that another directory serves isn't believed: the server is asked.
                elif frame is not None and self._server.silent([self._inbox]):
                    raise OSError("the directory has gone")
        except OSError:
            self.broken = "the server, or the directory, has gone"
            self._wake()


class RelayedDirectory:
    """Serves from when it is made until ``close``, or until it is ``over``: the server has gone, or
    the directory has been silent for so long that another one serves. OSError: the server isn't
    there."""

    def __init__(self, notices: Notices, claimed: Claimed) -> None:
        self._server = notices.server
        self._notices = notices
        self._inbox = claimed.notice.inbox
        self._value = claimed.value
        self._session = claimed.notice.session
        self._directory = Directory(time.monotonic, session=self._session)
        if claimed.begun:
            self._directory.adopt(self._session)
        self.service = DirectoryService(self._directory, strangers=MOST_PEERS + STRANGERS)
        self.service.counts = notices.counts
        self._sessions: dict[bytes, tuple[PeerSession, RelayedConnection]] = {}
        self._unsent: list[tuple[bytes, bytes]] = []
        """(whose, frame), until the end of the turn: they go together."""
        self._heard = self._renewed = time.monotonic()
        """When its own sign of life last came back, and when the notice was last renewed."""
        self._stop = self.over = False
        self._subscription = self._server.listen(notices.channel(self._inbox))
        try:
            self._server.publish([(notices.news, b"")])
        except BaseException:
            self._subscription.close()
            raise
        self._thread = threading.Thread(target=self._run, name="lossycoll-directory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, and tells the peers. Idempotent."""
        self._stop = True
        with contextlib.suppress(OSError):  # it looks by itself, some time later
            self._server.publish([(self._notices.channel(self._inbox), b"")])
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
            self.service.tell_all(Leave())
            self._flush()
            self._notices.release(self._value, others=len(self._directory.peers) > 0)
        except OSError as error:
            if not self._stop:
                log.info("directory at %s ends: %s", self._notices.key, error)
        finally:
            self.over = True
            self._subscription.close()

    def _turn(self) -> None:
        due = self._renewed + RENEW_SECONDS - time.monotonic()
        frame = self._subscription.get(max(0.0, min(due, self.service.wait())))
        # One that was frozen says nothing more: peers may have another.
        if time.monotonic() - min(self._heard, self._renewed) > LEASE:
            raise OSError(f"it was silent for more than {LEASE:g} s")
        taken = 0
        while frame is not None:
            self._take(frame)
            taken += 1
            if taken % ANSWERED_AT_ONCE == 0:
                self._flush()
                self._renew()
            frame = self._subscription.get(0.0) if taken < AT_ONCE else None
        self.service.turn()
        self._flush()
        self._renew()

    def _take(self, frame: bytes) -> None:
        if not frame:
            self._heard = time.monotonic()
            return
        incarnation, body = frame[:INCARNATION_BYTES], frame[INCARNATION_BYTES:]
        known = self._sessions.get(incarnation)
        if known is None:
            begins = len(body) == NONCE_BYTES if self._notices.frames_key else bool(body)
            if not begins:  # of a connection that is over, if of any
                self._notices.counts["foreign"] += 1
                return
            how = self._notices.frames_key, self._notices.counts
            send = functools.partial(self._send, incarnation)
            own = RelayedConnection(send, *how, connects=False)
            session = self.service.admit(own, lambda: self._sessions.pop(incarnation, None))
            known = self._sessions[incarnation] = session, own
        session, connection = known
        connection.put(body)
        self.service.hear(session)

    def _send(self, incarnation: bytes, frame: bytes) -> bool:
        self._unsent.append((incarnation, frame))
        return True

    def _flush(self) -> None:
        """Sends what is to be sent, and what comes of it that somebody isn't there."""
        while self._unsent:
            frames, self._unsent = self._unsent, []
            found = [(self._channel(incarnation), frame) for incarnation, frame in frames]
            self._end(self._server.publish(found))

    def _renew(self) -> None:
        if time.monotonic() - self._renewed < RENEW_SECONDS:
            return
        value = self._value
        if self._directory.session != self._session:  # it is now that of peers which came back
            self._session = self._directory.session
            value = self._notices.value(Notice(self._inbox, self._session))
        if not self._notices.renew(self._value, value):
            raise OSError("another one serves")
        self._value, self._renewed = value, time.monotonic()
        self._server.publish([(self._notices.channel(self._inbox), b"")])
        self._end(self._server.silent([self._channel(one) for one in self._sessions]))
        self._flush()

    def _end(self, silent: Set[str]) -> None:
        for incarnation, (session, _) in list(self._sessions.items() if silent else ()):
            if self._channel(incarnation) in silent:
                self.service.end(session)

    def _channel(self, incarnation: bytes) -> str:
        return self._notices.channel(incarnation.hex())

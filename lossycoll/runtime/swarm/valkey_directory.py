"""A directory in a peer that listens on no port: a valkey server carries what it hears and says."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from typing import Final

from lossycoll.runtime.keys.secret import Secret

from .directory import LEASE, Directory
from .protocol import PLACES, Leave
from .reception import STRANGERS, Link, Reception
from .relayed import NONCE_BYTES, Relayed
from .valkey_notice import Claimed, Notice, Notices
from .valkey_server import ValkeyServer

RENEW_SECONDS: Final = 1.0
"""Between two renewals of the notice, at which peers that have gone are found, too."""
AT_ONCE: Final = 2 * PLACES
"""Frames that are taken before groups are formed: whoever has said that it is ready isn't late."""
ANSWERED_AT_ONCE: Final = 128
"""Frames that are taken before answers go."""
COMING_BYTES: Final = 16
log: Final = logging.getLogger("lossycoll")


def key_of(secret: Secret | None, notices: Notices) -> bytes | None:
    """What connections of a swarm are sealed with. Another prefix has another."""
    return None if secret is None else secret.derived("relay", notices.key)


class _End(Relayed):
    """A directory's end of a connection. ``coming``: what tells it from others."""

    def __init__(
        self,
        coming: bytes,
        send: Callable[[bytes], bool],
        key: bytes | None,
        counts: Counter[str],
    ) -> None:
        super().__init__(send, key, counts, connects=False)
        self.coming = coming


class RelayedDirectory:
    """Serves from when it is made until ``close``, or until it is ``over``: the server has gone, or
    the directory has been silent for so long that another one serves.

    Args:
        server: What carries all.
        notices: The swarm's.
        claimed: This one's.
        secret: What peers must have; None: all is in clear.

    Raises:
        OSError: The server isn't there.
    """

    def __init__(
        self, server: ValkeyServer, notices: Notices, claimed: Claimed, secret: Secret | None
    ) -> None:
        self._server = server
        self._notices = notices
        self._inbox = claimed.notice.inbox
        self._value = claimed.value
        self._session = claimed.notice.session
        self._key = key_of(secret, notices)
        self.counts: Counter[str] = Counter()
        """What came and isn't believed, by why."""
        self._directory = Directory(time.monotonic, session=self._session)
        if claimed.begun:
            self._directory.adopt(self._session)
        self.reception = Reception(self._directory, self._drop, strangers=PLACES + STRANGERS)
        self._links: dict[bytes, tuple[Link, _End]] = {}
        self._unsent: list[tuple[bytes, bytes]] = []
        """(whose, frame), until the end of the turn: they go together."""
        self._heard = self._renewed = time.monotonic()
        """When its own sign of life last came back, and when the notice was last renewed."""
        self._stop = self.over = False
        self._subscription = server.listen(notices.channel(self._inbox))
        try:
            server.publish([(notices.news, b"")])
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
            self.reception.tell_all(Leave())
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
        frame = self._subscription.get(max(0.0, min(due, self.reception.wait())))
        # One that was frozen says nothing more: peers may have another.
        if time.monotonic() - min(self._heard, self._renewed) > LEASE:
            raise OSError(f"it was silent for more than {LEASE:g} s")
        taken = 0
        while frame is not None:
            self._take(frame)
            taken += 1
            if taken % ANSWERED_AT_ONCE == 0:
                self._flush()
                self._renew_in_time()
            frame = self._subscription.get(0.0) if taken < AT_ONCE else None
        self.reception.turn()
        self._flush()
        self._renew_in_time()

    def _take(self, frame: bytes) -> None:
        if not frame:
            self._heard = time.monotonic()
            return
        coming, body = frame[:COMING_BYTES], frame[COMING_BYTES:]
        known = self._links.get(coming)
        if known is None:
            begins = len(body) == NONCE_BYTES if self._key is not None else bool(body)
            if not begins:  # of a connection that is over, if of any
                self.counts["foreign"] += 1
                return
            known = self._links[coming] = self._admit(coming)
        link, end = known
        end.put(body)
        self.reception.hear(link)

    def _admit(self, coming: bytes) -> tuple[Link, _End]:
        def send(frame: bytes) -> bool:
            self._unsent.append((coming, frame))
            return True

        end = _End(coming, send, self._key, self.counts)
        return self.reception.admit(end), end

    def _drop(self, link: Link) -> None:
        assert isinstance(link.session, _End)
        self._links.pop(link.session.coming, None)

    def _flush(self) -> None:
        """Sends what is to be sent, and what comes of it that somebody isn't there."""
        while self._unsent:
            frames, self._unsent = self._unsent, []
            found = [(self._channel(coming), frame) for coming, frame in frames]
            self._end(self._server.publish(found))

    def _renew_in_time(self) -> None:
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._renew()

    def _renew(self) -> None:
        value = self._value
        if self._directory.session != self._session:  # it is now that of peers which came back
            self._session = self._directory.session
            value = self._notices.value(Notice(self._inbox, self._session))
        if not self._notices.renew(self._value, value):
            raise OSError("another one serves")
        self._value, self._renewed = value, time.monotonic()
        self._server.publish([(self._notices.channel(self._inbox), b"")])
        self._end(self._server.silent([self._channel(one) for one in self._links]))
        self._flush()

    def _end(self, silent: Set[str]) -> None:
        """Nobody listens to these channels any more."""
        for coming, (link, _) in list(self._links.items() if silent else ()):
            if self._channel(coming) in silent:
                self.reception.end(link)

    def _channel(self, coming: bytes) -> str:
        return self._notices.channel(coming.hex())

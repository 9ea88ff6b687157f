"""A swarm that meets by a valkey server: no peer listens on a port.

Each peer connects with the server alone. What it says goes through there to the directory, which
runs in the peer whose notice stands under the swarm's key (valkey_notice.py). If that one goes,
another peer's begins, and peers turn to it as they do to a directory that takes over.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.keys.secret import Secret

from .relayed import RelayedConnection
from .valkey_directory import INCARNATION_BYTES, RelayedDirectory, key_of
from .valkey_notice import Notices
from .valkey_server import Subscription, ValkeyServer, ValkeyUrl

BEGIN_SECONDS: Final = 0.9
"""For which a newcomer that finds no swarm looks again before it begins one: if the server has
started again, those that were in it come first."""
LOOK_SECONDS: Final = 0.2
"""After which a thread looks whether its connection has been closed."""


class ValkeyRelay:
    """Transport of one peer by a valkey server, until ``close``. ``secret``: the swarm's; None: all
    is in clear. OptionError: the package ``valkey`` isn't there."""

    def __init__(self, address: ValkeyUrl, secret: Secret | None) -> None:
        self._server = ValkeyServer(address)
        self._notices = Notices(self._server, address.prefix, secret)
        self._secret = secret
        self._directory: RelayedDirectory | None = None
        self._alone_since: float | None = None
        """When no swarm was found for the first time; None: one was."""
        self._counts: Counter[str] = Counter()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readable = select.poll()
        self._readable.register(self._wake, select.POLLIN)

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
            self._directory = RelayedDirectory(self._server, self._notices, found, self._secret)
        return _ClientConnection(
            self._server,
            self._notices,
            found.notice.inbox,
            key_of(self._secret, self._notices),
            self._counts,
            self.wake,
        )

    def wait(self, seconds: float) -> None:
        if self._readable.poll(1000 * seconds):
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """The peer has closed its connection already."""

    @property
    def counts(self) -> Counter[str]:
        """Counts of frames and notices that weren't believed, by why."""
        found = self._counts + self._notices.counts
        if self._directory is not None:
            found += self._directory.counts + self._directory.service.counts
        return found

    def close(self) -> None:
        """Ends the connections, and this peer's directory. Idempotent."""
        self._end_directory()
        self._server.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _end_directory(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._counts += self._directory.counts + self._directory.service.counts
            self._directory = None


class _ClientConnection(RelayedConnection):
    """A peer's end, with a thread that takes what comes. ``wake``: called by the thread when
    something has come, or it has broken."""

    def __init__(
        self,
        server: ValkeyServer,
        notices: Notices,
        inbox: str,
        key: bytes | None,
        counts: Counter[str],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(self._publish, key, counts, connects=True)
        self._wake = wake
        self._server = server
        self._inbox = notices.channel(inbox)
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        channel = notices.channel(self._incarnation.hex())
        self._subscription: Subscription = server.listen(channel, notices.news)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="lossycoll-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, too."""
        if not self._closed:
            self._closed = True
            self._thread.join()
            self._subscription.close()

    def _publish(self, frame: bytes) -> bool:
        try:
            return not self._server.publish([(self._inbox, self._incarnation + frame)])
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

"""A valkey server, as far as swarms need one: channels that carry frames, and a key with a lease.

All of it raises OSError, within CONNECT_SECONDS, if the server isn't there or doesn't let us.
Nothing is connected again unseen: a channel on which a frame may have been lost is broken.

:class:`Notices` has the key under which stands whose directory serves. No clocks of peers are
compared: the server's alone says how old the notice is. A directory serves as long as it renews its
notice and listens to its inbox; when it doesn't, one peer takes its place.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lossycoll.errors import OptionError
from lossycoll.runtime.keys.aead import SealedValues
from lossycoll.runtime.keys.secret import Secret

from .directory import LEASE
from .directory_tables import KEPT_SECONDS
from .directory_transport import CONNECT_SECONDS

SCHEME: Final = "valkey://"
PORT: Final = 6379
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GRACE_SECONDS: Final = 2.0
"""For which a notice holds though nobody listens to the inbox: its directory is about to."""
TRIES: Final = 4
_INBOX, _SESSION = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16,64}")
_TAKE: Final = """
-- A key of another type is nobody's notice.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'string' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local now = redis.call('GET', KEYS[1]) or ''
local seen, inbox, offer = ARGV[1], ARGV[2], ARGV[3]
local kept, lease, grace = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if now ~= '' and now ~= seen then return now end
if now ~= '' and inbox ~= '' then
    local age = kept - redis.call('PTTL', KEYS[1])
    local listeners = redis.call('PUBSUB', 'NUMSUB', inbox)[2]
    if age >= 0 and age < lease and (age < grace or listeners > 0) then return now end
end
if kept == 0 then redis.call('DEL', KEYS[1])
elseif offer ~= '' then redis.call('SET', KEYS[1], offer, 'PX', kept) end
return offer
"""
"""Offers a notice in the place of the one that was seen, if that stands there yet, or none: for so
many ms. One whose directory listens to its inbox, and has renewed it in time, stays."""


@dataclass(frozen=True, slots=True)
class ValkeyUrl:
    """Address of a swarm at a valkey server. ``prefix``: of the swarm's names there. ``user``: "":
    the server's default one. ``password``: "": none."""

    host: str
    port: int
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, text: str) -> ValkeyUrl:
        """Reads ``valkey://user:password@host:port/prefix``. OptionError: it is none."""
        try:
            parts = urllib.parse.urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not _PREFIX.fullmatch(parts.path[1:]) or parts.query or parts.fragment:
            _, _, shown = text.rpartition("@")  # without what may be a password
            raise OptionError(
                f"{shown!r} is no valkey://host:port/prefix; a prefix has 1 to 64 of A-Z, a-z, "
                f"0-9, '_', '.' and '-'"
            )
        unquote = urllib.parse.unquote
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(host, PORT if port is None else port, parts.path[1:], user, password)


class ValkeyServer:
    """Connects when it is first used. Threads may share it. OptionError: the package ``valkey``
    isn't there."""

    def __init__(self, address: ValkeyUrl) -> None:
        try:
            import valkey
            from valkey.backoff import NoBackoff
            from valkey.retry import Retry
        except ImportError as error:
            raise OptionError(
                f"{SCHEME} needs the package valkey: pip install 'lossycoll[valkey]' ({error})"
            ) from None
        self._errors: type[Exception] = valkey.ValkeyError
        self._client: Any = valkey.Valkey(
            host=address.host,
            port=address.port,
            username=address.user or None,
            password=address.password or None,
            socket_timeout=CONNECT_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise OSError(str(error)) from error

    def take(
        self, key: str, seen: bytes, inbox: str, offer: bytes, seconds: Sequence[float]
    ) -> bytes:
        """Offer a notice (:data:`_TAKE`), and return what stands there now."""
        times = [round(1000 * one) for one in seconds]
        with self._heard():
            found = self._client.eval(_TAKE, 1, key, seen, inbox, offer, *times)
        if not isinstance(found, bytes):
            raise OSError(f"the server answers {str(found)[:80]!r}")
        return found

    def publish(self, frames: Sequence[tuple[str, bytes]]) -> set[str]:
        """Sends frames, each by a channel. Returns the channels to which nobody listens: whoever
        looks on by a pattern counts in what PUBLISH answers, and not here."""
        channels = list(dict.fromkeys(channel for channel, _ in frames))
        with self._heard():
            pipeline = self._client.pipeline(transaction=False)
            for channel, frame in frames:
                pipeline.publish(channel, frame)
            pipeline.pubsub_numsub(*channels)
            return _silent(channels, pipeline.execute()[-1])

    def silent(self, channels: Sequence[str]) -> set[str]:
        with self._heard():
            return _silent(channels, self._client.pubsub_numsub(*channels)) if channels else set()

    def listen(self, channel: str, *hints: str) -> Subscription:
        """Listen to what others publish from now on. ``channel``: its frames are those of
        :meth:`Subscription.get`. ``hints``: what comes by these is an empty frame there."""
        with self._heard():
            pubsub = self._client.pubsub()
            try:
                pubsub.subscribe(channel, *hints)
                for _ in (channel, *hints):
                    if pubsub.get_message(timeout=CONNECT_SECONDS) is None:
                        raise OSError(f"no subscription within {CONNECT_SECONDS:g} s")
            except BaseException:
                pubsub.close()
                raise
        return Subscription(pubsub, channel, self._errors)

    def close(self) -> None:
        self._client.close()


def _silent(channels: Sequence[str], counts: Sequence[tuple[bytes, int]]) -> set[str]:
    return {one for one, (_, count) in zip(channels, counts, strict=True) if not int(count)}


class Subscription:
    def __init__(self, pubsub: Any, channel: str, errors: type[Exception]) -> None:
        self._pubsub = pubsub
        self._channel = channel.encode()
        self._errors = errors

    def get(self, timeout: float) -> bytes | None:
        """The next frame; None: there is none within ``timeout`` seconds."""
        try:
            found = self._pubsub.get_message(timeout=timeout)
        except self._errors as error:
            raise OSError(str(error)) from error
        if found is None or found["type"] != "message":
            return None
        frame = found["data"] if found["channel"] == self._channel else b""
        return frame if isinstance(frame, bytes) else None

    def close(self) -> None:
        self._pubsub.close()


class Notice(NamedTuple):
    """Content of the notice. ``inbox``: what tells the channel to which the directory listens from
    all others. ``session``: the swarm's."""

    inbox: str
    session: str


class Claimed(NamedTuple):
    """Outcome of a claim: whose directory serves, and ``value``, as the notice stands there.
    ``own``: it is the claimant's, from now on; ``begun``: and there may be peers that another
    directory knew."""

    notice: Notice
    value: bytes
    own: bool
    begun: bool


class Notices:
    """Notices of one swarm. ``secret``: the swarm's; None: all is in clear."""

    def __init__(self, server: ValkeyServer, prefix: str, secret: Secret | None) -> None:
        self.server = server
        self._sealed = None if secret is None else SealedValues(secret)
        self.key = f"lossycoll:{prefix}"
        self.frames_key = None if secret is None else secret.derived("relay", self.key)
        """Key by which connections of this prefix are sealed; None: they are in clear."""
        self.news = self.channel("news")  # a channel: somebody's directory has taken the place
        self.counts: Counter[str] = Counter()  # frames and notices that weren't believed, by why

    def channel(self, name: str) -> str:
        """The channel of an inbox, or of a peer's connection."""
        return f"{self.key}:{name}"

    def claim(self, session: str, begins: bool) -> Claimed | None:
        """Finds whose directory serves, or takes the place. ``session``: that the claimant has been
        in; "": none. ``begins``: whether it may begin a swarm. Returns whose directory serves;
        None: nobody's, and the claimant may not begin. OSError: the server isn't there."""
        seen = b""
        for _ in range(TRIES):
            notice = self._read(seen) if seen else None
            kept = notice.session if notice else session
            own = Notice(secrets.token_hex(16), kept or secrets.token_hex(8))
            offer = self.value(own) if kept or begins else b""
            # Those that were in the swarm know better than a newcomer, who may have another secret.
            grace = LEASE if seen and not notice and not session else GRACE_SECONDS
            times = KEPT_SECONDS, LEASE, grace
            inbox = self._inbox_of(seen)
            theirs = self.channel(inbox) if inbox else ""
            now = self.server.take(self.key, seen, theirs, offer, times)
            if now == b"":
                return None
            if now == offer:
                return Claimed(own, offer, True, bool(kept))
            if now == seen and notice is None:
                raise OSError("whoever serves there has another secret, or none")
            if now == seen and notice is not None:
                return Claimed(notice, now, False, True)
            seen = now
        raise OSError(f"{self.key} changes all the time")

    def renew(self, before: bytes, value: bytes) -> bool:
        """The directory still serves. Returns whether it may: no other one does."""
        for _ in range(TRIES):
            now = self.server.take(self.key, before, "", value, (KEPT_SECONDS, 0, 0))
            if now == value:
                return True
            other = self._read(now)
            if other is not None and other.inbox != self._inbox_of(value):
                return False
            before = now  # a stranger's, or brought back by one
        return False

    def release(self, value: bytes, *, others: bool) -> None:
        """The directory ends. ``others``: it leaves peers behind, whose swarm goes on."""
        left = KEPT_SECONDS - LEASE if others else 0.0
        self.server.take(self.key, value, "", value, (left, 0, 0))

    def value(self, notice: Notice) -> bytes:
        """Return the value of a notice: the inbox, which the server looks at, and the session."""
        inbox, session = notice
        sealed = (
            session if self._sealed is None else self._sealed.seal(self.channel(inbox), session)
        )
        return f"{inbox} {sealed}".encode()

    def _inbox_of(self, value: bytes) -> str:
        """That a value names, whoever wrote it; "": none."""
        found = value[:32].decode(errors="replace")
        return found if _INBOX.fullmatch(found) else ""

    def _read(self, value: bytes) -> Notice | None:
        inbox = self._inbox_of(value)
        session: str | None = value[33:].decode(errors="replace")
        if self._sealed is not None and session is not None:
            session = self._sealed.open(self.channel(inbox), session)
            if session is None:
                self.counts["forged"] += 1
                return None
        if inbox and session is not None and _SESSION.fullmatch(session):
            return Notice(inbox, session)
        self.counts["malformed"] += 1
        return None

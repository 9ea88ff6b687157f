"""A valkey server, as far as swarms need one: channels that carry frames, and a key with a lease.

All of it raises OSError, within CONNECT_SECONDS, if the server isn't there or doesn't let us.
Nothing is connected again unseen: a channel on which a frame may have been lost is broken.
"""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lossycoll.errors import OptionError

from .directory_transport import CONNECT_SECONDS

SCHEME: Final = "valkey://"
PORT: Final = 6379
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValkeyUrl:
    """Address of a swarm at a valkey server.

    Attributes:
        host: As it was given.
        port: Of the server.
        prefix: Of the swarm's names there.
        user: "": the server's default one.
        password: "": none.
    """

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

    def run(self, script: str, key: str, *arguments: str | bytes | int) -> bytes:
        """Run a Lua script that looks at one key, and return its answer."""
        with self._heard():
            found = self._client.eval(script, 1, key, *arguments)
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
        """Return the channels to which nobody listens now."""
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
        """Ends the connections, but for those of subscriptions. Idempotent."""
        self._client.close()


def _silent(channels: Sequence[str], counts: Sequence[tuple[bytes, int]]) -> set[str]:
    return {one for one, (_, count) in zip(channels, counts, strict=True) if not int(count)}


class Subscription:
    """Subscription to a channel, for one thread."""

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
        """Nobody listens any more. Idempotent."""
        self._pubsub.close()

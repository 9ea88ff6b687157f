"""The key of a valkey server under which stands whose directory serves.

No clocks of peers are compared: the server's alone says how old the notice is. A directory serves
as long as it renews its notice and listens to its inbox; when it doesn't, one peer takes its place.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from typing import Final, NamedTuple

from lossycoll.runtime.keys.aead import SealedValues
from lossycoll.runtime.keys.secret import Secret

from .directory import LEASE
from .directory_tables import KEPT_SECONDS
from .valkey_server import ValkeyServer

GRACE_SECONDS: Final = 2.0
"""For which a notice holds though nobody listens to the inbox: its directory is about to."""
TRIES: Final = 4
_INBOX, _SESSION = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16,64}")
_MS: Final = 1000

# A key of another type is nobody's notice.
_FOUND: Final = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'string' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local now = redis.call('GET', KEYS[1]) or ''
"""
_CLAIM: Final = (
    _FOUND
    + """
local seen, inbox, offer = ARGV[1], ARGV[2], ARGV[3]
local kept, lease, grace = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if now ~= '' and now ~= seen then return now end
if now ~= '' and inbox ~= '' then
    local age = kept - redis.call('PTTL', KEYS[1])
    local listeners = redis.call('PUBSUB', 'NUMSUB', inbox)[2]
    if age >= 0 and age < lease and (age < grace or listeners > 0) then return now end
end
if offer ~= '' then redis.call('SET', KEYS[1], offer, 'PX', kept) end
return offer
"""
)
_RENEW: Final = (
    _FOUND
    + """
if now ~= '' and now ~= ARGV[1] then return now end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""
)
_RELEASE: Final = (
    _FOUND
    + """
if now == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return now
"""
)


class Notice(NamedTuple):
    """Content of the notice. ``inbox``: what tells the channel to which the directory listens from
    all others. ``session``: the swarm's."""

    inbox: str
    session: str


class Claimed(NamedTuple):
    """Outcome of a claim.

    Attributes:
        notice: Whose directory serves.
        value: As it stands there.
        own: It is the claimant's, from now on.
        begun: And there may be peers that another directory knew.
    """

    notice: Notice
    value: bytes
    own: bool
    begun: bool


class Notices:
    """Notices of one swarm. ``secret``: the swarm's; None: all is in clear."""

    def __init__(self, server: ValkeyServer, prefix: str, secret: Secret | None) -> None:
        self._server = server
        self._sealed = None if secret is None else SealedValues(secret)
        self.key = f"lossycoll:{prefix}"
        self.news = self.channel("news")
        """A channel: somebody's directory has taken the place."""
        self.counts: Counter[str] = Counter()
        """Number of rejected entries, by reason."""

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
            times = [round(one * _MS) for one in (KEPT_SECONDS, LEASE, grace)]
            inbox = self._inbox_of(seen)
            theirs = self.channel(inbox) if inbox else ""
            now = self._server.run(_CLAIM, self.key, seen, theirs, offer, *times)
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
            kept = round(KEPT_SECONDS * _MS)
            now = self._server.run(_RENEW, self.key, before, value, kept)
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
        self._server.run(_RELEASE, self.key, value, round(left * _MS))

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
        """Read a notice, if it is to be believed."""
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

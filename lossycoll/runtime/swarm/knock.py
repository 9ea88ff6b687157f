"""Knocks: out-of-band datagrams by which peers find routes to each other, and their own address in
the world. docs/moshpit.md has the table.

All have the same size, so that no answer is larger than its question. The tag is of a key that the
swarm's secret and session make; without a secret, of the session alone.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lossycoll.runtime.engine.out_of_band import MARK, Place
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.messages import Malformed

from .protocol import PLACES

KNOCK_VERSION: Final = 1
DIRECTORY: Final = 0xFFFF
"""The directory's number."""
NONCE: Final = 16
NOTHING: Final = bytes(NONCE)
"""No nonce."""
COMING: Final = 8
NOBODY: Final = bytes(COMING)
_BODY: Final = struct.Struct("!4sBBHHH8s16s16s16s")
_TAG: Final = 16
KNOCK_BYTES: Final = _BODY.size + _TAG


class Kind(IntEnum):
    """What a knock says."""

    KNOCK = 1
    """Is somebody there?"""
    ANSWER = 2
    """Yes, and I saw you at this place."""
    TAKE = 3
    """We both take the route by which this comes."""
    TAKEN = 4
    """So do I."""
    ALIVE = 5
    """Nothing: what lies between shall go on letting packets through."""


class Forged(Malformed):
    """Of another secret, another session, or changed on the way."""


@dataclass(frozen=True, slots=True)
class Knock:
    """One. ``coming``: the sender's, as :func:`short` has it; NOBODY if it doesn't matter.
    ``nonce``: the sender's in this try. ``echo``: the receiver's. ``seen``: where a knock came from
    that is answered."""

    kind: Kind
    sender: int
    receiver: int
    coming: bytes = NOBODY
    nonce: bytes = NOTHING
    echo: bytes = NOTHING
    seen: Place | None = None


def short(coming: str) -> bytes:
    """What knocks have of a coming: its end, as a process's comings all begin alike."""
    return bytes.fromhex(coming)[-COMING:]


def key_of(secret: Secret | None, session: str) -> bytes:
    """What knocks of a swarm are known by."""
    if secret is not None:
        return secret.derived("knock", session)
    return hashlib.sha256(f"knock/{session}".encode()).digest()


def pack(knock: Knock, key: bytes) -> bytes:
    """KNOCK_BYTES."""
    address, port = bytes(16), 0
    if knock.seen is not None:
        address, port = _mapped(knock.seen[0]), knock.seen[1]
    numbers = MARK, KNOCK_VERSION, knock.kind, knock.sender, knock.receiver, port
    body = _BODY.pack(*numbers, knock.coming, address, knock.nonce, knock.echo)
    return body + _tag(key, body)


def unpack(data: bytes, key: bytes) -> Knock:
    """What somebody has sent.

    Raises:
        Forged: Nobody of this swarm has made it so.
        Malformed: It is none.
    """
    if len(data) != KNOCK_BYTES:
        raise Malformed(f"{len(data)} bytes are no knock")
    body, tag = data[: _BODY.size], data[_BODY.size :]
    if not hmac.compare_digest(tag, _tag(key, body)):
        raise Forged("a knock of another swarm")
    mark, version, kind, sender, receiver, port, coming, address, nonce, echo = _BODY.unpack(body)
    if mark != MARK or version != KNOCK_VERSION or kind not in set(Kind):
        raise Malformed(f"a knock of version {version} and kind {kind}, wanted {KNOCK_VERSION}")
    if any(number >= PLACES and number != DIRECTORY for number in (sender, receiver)):
        raise Malformed(f"a knock from {sender} to {receiver}: no peers")
    return Knock(Kind(kind), sender, receiver, coming, nonce, echo, _place(address, port))


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:_TAG]


def _mapped(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (b"" if address.version == 6 else bytes(10) + b"\xff\xff") + address.packed


def _place(address: bytes, port: int) -> Place | None:
    found = ipaddress.IPv6Address(address)
    return (str(found.ipv4_mapped or found), port) if port else None

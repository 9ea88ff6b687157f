"""Connectivity checks: out-of-band datagrams by which peers find routes to each other and learn
their reflexive addresses. docs/swarm-messages.md has the table.

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

from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.engine.host import MARK
from lossycoll.runtime.keys.secret import Secret

from .protocol import MOST_PEERS

CONNECTIVITY_VERSION: Final = 1
DIRECTORY: Final = 0xFFFF  # the directory's number
NONCE: Final = 16
NOTHING: Final = bytes(NONCE)  # no nonce
INCARNATION: Final = 8
NOBODY: Final = bytes(INCARNATION)
_BODY: Final = struct.Struct("!4sBBHHH8s16s16s16s")
_TAG: Final = 16
CONNECTIVITY_BYTES: Final = _BODY.size + _TAG


class Kind(IntEnum):
    CHECK = 1  # connectivity check: is somebody there?
    ANSWER = 2  # answer to a check, with the address that the check came from
    NOMINATE = 3  # nomination of the route by which this comes
    NOMINATED = 4  # confirmation of a nomination
    KEEPALIVE = 5  # keepalive for the NATs on a route


class Forged(Malformed):
    """Message of another secret or session, or one that was changed on the way."""


@dataclass(frozen=True, slots=True)
class ConnectivityMessage:
    """One connectivity message. ``incarnation``: the sender's, as :func:`short` has it; NOBODY if
    it doesn't matter. ``nonce``: the sender's in this try. ``echo``: the receiver's.
    ``reflexive``: the source of a check that is answered."""

    kind: Kind
    sender: int
    receiver: int
    incarnation: bytes = NOBODY
    nonce: bytes = NOTHING
    echo: bytes = NOTHING
    reflexive: Address | None = None


def short(incarnation: str) -> bytes:
    """Return the part of an incarnation that messages carry: its end, as all of a process begin
    alike."""
    return bytes.fromhex(incarnation)[-INCARNATION:]


def key_of(secret: Secret | None, session: str) -> bytes:
    """Derive the key that authenticates a swarm's connectivity messages."""
    if secret is not None:
        return secret.derived("connectivity", session)
    return hashlib.sha256(f"connectivity/{session}".encode()).digest()


def pack(message: ConnectivityMessage, key: bytes) -> bytes:
    address, port = bytes(16), 0
    if message.reflexive is not None:
        address, port = _mapped(message.reflexive[0]), message.reflexive[1]
    numbers = MARK, CONNECTIVITY_VERSION, message.kind, message.sender, message.receiver, port
    body = _BODY.pack(*numbers, message.incarnation, address, message.nonce, message.echo)
    return body + _tag(key, body)


def unpack(data: bytes, key: bytes) -> ConnectivityMessage:
    """Read a datagram. Forged: nobody of this swarm has made it so. Malformed: it is none."""
    if len(data) != CONNECTIVITY_BYTES:
        raise Malformed(f"{len(data)} bytes are no connectivity message")
    body, tag = data[: _BODY.size], data[_BODY.size :]
    if not hmac.compare_digest(tag, _tag(key, body)):
        raise Forged("a connectivity message of another swarm")
    mark, version, kind, sender, receiver, port, incarnation, address, nonce, echo = _BODY.unpack(
        body
    )
    if mark != MARK or version != CONNECTIVITY_VERSION or kind not in set(Kind):
        raise Malformed(
            f"a connectivity message of version {version} and kind {kind}, wanted version "
            f"{CONNECTIVITY_VERSION}"
        )
    if any(number >= MOST_PEERS and number != DIRECTORY for number in (sender, receiver)):
        raise Malformed(f"a connectivity message from {sender} to {receiver}: no peers")
    return ConnectivityMessage(
        Kind(kind), sender, receiver, incarnation, nonce, echo, _place(address, port)
    )


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:_TAG]


def _mapped(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (b"" if address.version == 6 else bytes(10) + b"\xff\xff") + address.packed


def _place(address: bytes, port: int) -> Address | None:
    found = ipaddress.IPv6Address(address)
    return (str(found.ipv4_mapped or found), port) if port else None

"""The engine's codes, and the one funnel from them to the errors that users catch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from lossycoll.errors import (
    AbortedError,
    ClosedError,
    EngineError,
    LinkError,
    LossyError,
    MismatchError,
    OperationTimeout,
    OptionError,
)

NUMERIC: Final = re.compile(r"[0-9a-f]*[.:][0-9a-f.:]*")


def place_text(host: str, port: int) -> str:
    """A numeric address and a port as one text, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of(text: str) -> tuple[str, int]:
    """Host and port of what :func:`place_text` returns. OptionError: it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        wanted = "wanted one as in 10.0.0.1:29400, or [fd00::1]:29400, with a port of 0 to 65535"
        raise OptionError(f"{text!r} is no HOST:PORT; {wanted}")
    return host.strip("[]"), int(port)


class Code(IntEnum):
    """lc_code of native/lossycoll_types.h."""

    OK = 0
    PENDING = 1
    ARGUMENT = -1
    MEMORY = -2
    SYSTEM = -3
    MISMATCH = -4
    TIMEOUT = -5
    ABORTED = -6
    CLOSED = -7
    LINK = -8
    MESSAGE = -9
    MESSAGE_LATE = -10
    PEER = -11
    CRYPTO = -12


@dataclass(frozen=True, slots=True)
class Failure:
    """lc_failure of native/lossycoll.h. ``op``: of a message (``of_message``) its own number, which
    is no operation's. ``mine`` and ``theirs``: signature, elements, dtype; for
    LINK ``mine`` has the packets that the peer sent, and (``mine[2]``) nanoseconds, and
    ``theirs`` the packets that were sent to a peer which hears nothing. For
    MESSAGE they have tag, elements and type; so has ``mine`` for MESSAGE_LATE, and ``theirs`` then
    the timeout in nanoseconds, and 1 for a send. For ARGUMENT, where a link takes no packets of
    this size, ``mine`` has that, and ``theirs`` the most that it takes and its number."""

    code: int
    errno: int = 0
    peer: int = -1
    op: int = 0
    of_message: bool = False
    mine: tuple[int, int, int] = (0, 0, 0)
    theirs: tuple[int, int, int] = (0, 0, 0)


def with_article(call: str) -> str:
    """A call without a number, as in "an all_reduce" and "a send"."""
    return f"{'an' if call[0] in 'aeiou' else 'a'} {call}"


@dataclass(frozen=True, slots=True)
class Where:
    """Location of a failure: whose call failed, and whom it is made with.

    ``call`` is the call as text ("": none), ``seq`` its number in the group (-1: a message has
    none), ``addresses`` one text per rank, ``timeout`` in seconds. ``group``: its name in torch.
    ``cut_off``: why this host can't send to the peer, with a remedy; "": no reason is known.
    """

    rank: int
    world: int
    call: str = ""
    seq: int = -1
    addresses: Sequence[str] = ()
    timeout: float = 0.0
    group: str = ""
    cut_off: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank}/{self.world}"
        if self.seq < 0:
            return f"{text}: {with_article(self.call)}" if self.call else text
        return f"{text}: call #{self.seq} {self.call}"

    def peer(self, rank: int) -> str:
        """A rank as errors write it: with its address, where that is known."""
        if rank < 0:
            return "a peer"
        known = 0 <= rank < len(self.addresses)
        return f"rank {rank} ({self.addresses[rank]})" if known else f"rank {rank}"

    def numeric(self, rank: int) -> str:
        """A rank's numeric address without its port; "" if it isn't known."""
        known = 0 <= rank < len(self.addresses)
        host = self.addresses[rank].rpartition(":")[0].strip("[]") if known else ""
        return host if NUMERIC.fullmatch(host) else ""


DTYPE_NAMES: Final = ("float32", "float64", "float16", "bfloat16", "bytes")
"""Names of lc_dtype's values, in their order."""
ELEMENT_TYPES: Final = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex32",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
"""Types of messages' elements. Their numbers go over the wire: a new one is added at the end."""
MESSAGES: Final = (Code.MESSAGE, Code.MESSAGE_LATE)
"""Failures of the group by a message, which say themselves what call it was."""


def type_number(name: str) -> int:
    """A message's type, as its sender tells it: of one that isn't listed, made of the name."""
    if name in ELEMENT_TYPES:
        return ELEMENT_TYPES.index(name)
    return 1 << 31 | zlib.crc32(name.encode())


def error_of(failure: Failure, where: Where) -> LossyError:
    """The typed error that belongs to an engine failure (``failure.code`` < 0)."""
    code = failure.code
    peer = failure.peer if failure.peer >= 0 else None
    who = where.peer(failure.peer)
    if code == Code.MISMATCH:
        return MismatchError(
            f"{where}: {who} means something else by operation {failure.op}: "
            f"{_difference(failure)}; make all ranks issue the same collectives in the same order "
            f"with the same sizes, dtypes and options",
            peer=peer,
        )
    if code == Code.TIMEOUT:
        return OperationTimeout(
            f"{where}: {who} didn't take part within {where.timeout:g} s; is it stuck or still "
            f"computing? a longer timeout is given to init_process_group or new_group",
            peer=peer,
        )
    if code == Code.LINK:
        return _link_error(failure, where)
    if code in MESSAGES:
        return _message_error(failure, where)
    if code == Code.ABORTED:
        return AbortedError(
            f"{where}: aborted; the first error of the job has the cause", peer=peer
        )
    if code == Code.CLOSED:
        return ClosedError(f"{where}: the group was destroyed before the operation ended")
    if code == Code.SYSTEM:
        reason = os.strerror(failure.errno)
        return EngineError(
            f"{where}: the socket failed with errno {failure.errno} ({reason}); "
            f"'lossycoll doctor' checks this machine",
            code=code,
            errno=failure.errno,
            peer=peer,
        )
    if code == Code.ARGUMENT and failure.mine[0] > failure.theirs[0] > 0:
        return EngineError(
            f"{where}: packets have {failure.mine[0]} bytes with their headers, and link "
            f"{failure.theirs[1]} takes {failure.theirs[0]} at most; lower LOSSYCOLL_MTU on all "
            f"ranks",
            code=code,
        )
    reasons: dict[int, str] = {
        Code.ARGUMENT: "refused an argument",
        Code.MEMORY: "ran out of memory",
        Code.CRYPTO: "found no libcrypto that can be used",
    }
    return EngineError(
        f"{where}: the engine {reasons.get(code, 'failed')} (code {code}); unless memory "
        f"is short this is a bug in lossycoll",
        code=code,
        errno=failure.errno,
        peer=peer,
    )


UDP_SILENT: Final = (
    "does a firewall drop UDP between the two (LOSSYCOLL_PORT_RANGE says which ports are used)?"
)
DATA_SILENT: Final = (
    "does a filter or an interface on the way drop packets by what they hold (smaller ones are "
    "tried, unless LOSSYCOLL_DISABLE=path_mtu), or is LOSSYCOLL_INJECT set?"
)
RDMA_SILENT: Final = "has a port of RDMA lost its link (`rdma link`, LOSSYCOLL_DISABLE=verbs)?"


def _link_error(failure: Failure, where: Where) -> LinkError:
    packets, _, waited = failure.mine
    link = f"the link from {where.peer(failure.peer)} to {where.peer(where.rank)}"
    seconds = f"{waited / 1e9:.3g} s"
    if packets:
        seen = (
            f"{link} delivers no data: of {packets} packets that were sent over it none "
            f"has come for {seconds}, though that rank's control packets do; {DATA_SILENT}"
        )
    else:
        by_rdma = "(RDMA " in where.peer(failure.peer)
        why = where.cut_off or (RDMA_SILENT if by_rdma else UDP_SILENT)
        seen = (
            f"{link} is silent: no packet has come for {seconds}, though that rank was asked all "
            f"the time and isn't lost; {why}"
        )
        if unheard := failure.theirs[0]:
            back = f"the link from {where.peer(where.rank)} to {where.peer(failure.peer)}"
            seen = (
                f"{back} is dead: of {unheard} packets that were sent over it in {seconds} none "
                f"has arrived, as that rank says, whose own packets come here; {why}"
            )
    return LinkError(
        f"{where}: {seen} 'lossycoll doctor --peer HOST', run at both ends, checks the network; "
        f"repair the link, or start the job without that rank",
        peer=failure.peer,
    )


def _message_error(failure: Failure, where: Where) -> LossyError:
    """A group that fails by a message fails for all its calls: the text names the message's."""
    tag, elements, name = _message(failure.mine)
    is_send = failure.code == Code.MESSAGE_LATE and failure.theirs[1] == 1
    who = where.peer(failure.peer)
    peer = failure.peer if failure.peer >= 0 else None
    verb = "send to" if is_send else "receive from"
    call = f"{verb} {failure.peer}" if peer is not None else "receive"
    text = f"rank {where.rank}/{where.world}: a {call} {name}[{elements}] tag {tag}"
    if failure.code == Code.MESSAGE:
        sent_tag, sent_elements, sent_name = _message(failure.theirs)
        return MismatchError(
            f"{text}: {who} sends {sent_name}[{sent_elements}] with tag {sent_tag} where "
            f"{name}[{elements}] is expected here; make dtype and number of elements of both calls "
            f"agree, and the order of those with the same tag",
            peer=peer,
        )
    what = f"{who} never {'took it' if is_send else 'sent it'}"
    if peer is None:
        what = "no rank sent anything with this tag"
    return OperationTimeout(
        f"{text}: {what} within {failure.theirs[0] / 1e9:g} s; is the other side stuck, still "
        f"computing or at another tag? a longer timeout is given to init_process_group or "
        f"new_group",
        peer=peer,
    )


def _message(said: tuple[int, int, int]) -> tuple[int, int, str]:
    tag, elements, number = said
    known = number < len(ELEMENT_TYPES)
    return tag, elements, ELEMENT_TYPES[number] if known else f"type {number:#x}"


def _difference(failure: Failure) -> str:
    """Difference of two calls, as ``name: mine here, theirs there``."""
    parts = []
    if failure.mine[2] != failure.theirs[2]:
        parts.append(f"{_dtype(failure.mine[2])} here, {_dtype(failure.theirs[2])} there")
    if failure.mine[1] != failure.theirs[1]:
        parts.append(f"{failure.mine[1]} elements here, {failure.theirs[1]} there")
    if not parts:
        parts.append("another collective, root, reduction, delivery or algorithm")
    return "; ".join(parts)


def _dtype(value: int) -> str:
    return DTYPE_NAMES[value] if 0 <= value < len(DTYPE_NAMES) else f"dtype {value}"

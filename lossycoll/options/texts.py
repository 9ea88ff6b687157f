"""Checks of options that are texts. A check returns the text in its final form, or raises
ValueError."""

from __future__ import annotations

import re
from typing import Final

from lossycoll.plan import faults

FAST_PATHS: Final = ("gso", "gro", "mmsg", "gather", "simd", "stamps", "path_mtu")
"""The engine's, in the order of its bits."""
STREAM_WAIT: Final = "stream_wait"
"""A device's streams wait for operations, in place of the host."""
DEVICE_WIRE: Final = "device_wire"
"""Floats are encoded in few bits on their device."""
VERBS: Final = "verbs"
"""Datagrams of RDMA."""
MAX_PORT: Final = 65535
CIPHERS: Final = ("aes-128-gcm", "aes-256-gcm", "chacha20-poly1305")
"""Names of lc_cipher's values, from 1 on."""
SECRET_VARIABLES: Final = ("LOSSYCOLL_SECRET", "LOSSYCOLL_SECRET_FILE")
OTHER_VARIABLES: Final = frozenset({"LOSSYCOLL_WERROR", "LOSSYCOLL_CFLAGS", *SECRET_VARIABLES})
"""No options: two are read when the extension is built, and may stand in a developer's environment;
the secret is nothing that ranks tell one another."""
OF_KUBERNETES: Final = re.compile(
    r"LOSSYCOLL\w*?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
"""Variables by which Kubernetes tells a pod of a service."""


def check_ports(text: str) -> str:
    if text != "0":
        low, _, high = text.partition("-")
        if not (low.strip().isdecimal() and high.strip().isdecimal()):
            raise ValueError("as in 40000-40100")
        if not 1 <= int(low) <= int(high) <= MAX_PORT:
            raise ValueError(f"lo is at most hi, both are 1 to {MAX_PORT}")
    return text


def check_metrics(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_place = port.isdecimal() and 0 < int(port) <= MAX_PORT and "/" not in host
    if text and not text.startswith("/") and not is_place:
        raise ValueError("HOST:PORT, :PORT or a path that begins with /")
    return text


def check_disable(text: str) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= {*FAST_PATHS, STREAM_WAIT, DEVICE_WIRE, VERBS}:
        raise ValueError
    return ",".join(names)


def check_inject(text: str) -> str:
    try:
        faults.parse(text)
    except ValueError as error:
        try:
            faults.fraction(text)
        except ValueError:
            raise error from None
        raise ValueError(f"did you mean loss={text}?") from None
    return text

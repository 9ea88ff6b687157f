"""Machine of this process, as far as that decides what it can share memory with.

Memory goes from process to process as a descriptor over an abstract Unix socket. Such sockets are
of a network namespace, and who is at the other end is judged by its user: so two processes can
share memory where kernel, network namespace, user namespace and user are the same. Whether they do,
only the attempt tells: images that were cloned after they had booted are alike in all of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine and namespaces of a process.

    Attributes:
        boot: The kernel's number of this boot: that of the machine, until it boots again.
        network: Its network namespace.
        users: Its user namespace.
        user: Its user there.
    """

    boot: str
    network: int
    users: int
    user: int

    def to_json(self) -> list[Any]:
        """JSON for a hello."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, said: Any) -> Machine | None:
        """Reads what another rank says; None where that isn't a machine."""
        kinds = (str, int, int, int)
        if not isinstance(said, Sequence) or len(said) != len(kinds):
            return None
        if not all(isinstance(value, kind) for value, kind in zip(said, kinds, strict=True)):
            return None
        return cls(*said)


def this_machine() -> Machine:
    """This process's."""
    boot = BOOT_ID.read_text(encoding="ascii").strip()
    network, users = ((NAMESPACES / name).stat().st_ino for name in ("net", "user"))
    return Machine(boot, network, users, os.geteuid())

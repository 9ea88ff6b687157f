"""What this machine offers a laboratory, and what it lacks."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from . import leftovers
from .backends import BACKENDS, missing
from .spawn import interpreter_problem
from .switch import instead


@dataclass(frozen=True)
class Capability:
    """One line: what was looked at, whether it is there, and what follows."""

    name: str
    good: bool
    found: str


def examine() -> list[Capability]:
    """Tries everything out rather than looking it up: what a kernel has isn't what it allows."""
    user = os.geteuid()
    out = [Capability("user", True, "root" if user == 0 else f"{user}, in a user namespace")]
    problem = interpreter_problem()
    out.append(Capability("interpreter", not problem, problem or sys.executable))
    for name in BACKENDS:
        why = missing(name)
        out.append(Capability(f"backend {name}", not why, why or BACKENDS[name]))
    for command in ("ip", "tc", "nft", "ethtool"):
        where = shutil.which(command)
        out.append(
            Capability(
                command, where is not None, where or "not there; the backends say who needs it"
            )
        )
    left = [one for one in leftovers.find() if not one.alive]
    text = ", ".join(f"{one.pid} ({one.command[:40]})" for one in left)
    out.append(Capability("leftovers", not left, text or "none"))
    if missing("switch"):
        out.append(Capability("instead", True, instead()))
    return out


def can_run(findings: list[Capability]) -> bool:
    """Whether a laboratory of any network can be made."""
    return any(one.good for one in findings if one.name in ("backend netem", "backend switch"))

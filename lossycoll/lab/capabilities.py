"""What this machine offers a laboratory, and what it lacks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from . import leftovers
from .backends import BACKENDS, missing
from .switch import instead


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is there, and what follows."""

    name: str
    good: bool
    found: str


def examine() -> list[Finding]:
    """Tries everything out rather than looking it up: what a kernel has isn't what it allows."""
    user = os.geteuid()
    out = [Finding("user", True, "root" if user == 0 else f"{user}, in a user namespace")]
    for name in BACKENDS:
        why = missing(name)
        out.append(Finding(f"backend {name}", not why, why or BACKENDS[name]))
    for command in ("ip", "tc", "nft", "ethtool"):
        where = shutil.which(command)
        out.append(
            Finding(command, where is not None, where or "not there; the backends say who needs it")
        )
    left = [one for one in leftovers.find() if not one.alive]
    text = ", ".join(f"{one.pid} ({one.command[:40]})" for one in left)
    out.append(Finding("leftovers", not left, text or "none"))
    if missing("switch"):
        out.append(Finding("instead", True, instead()))
    return out


def can_run(findings: list[Finding]) -> bool:
    """Whether a laboratory of any network can be made."""
    return any(one.good for one in findings if one.name in ("backend netem", "backend switch"))

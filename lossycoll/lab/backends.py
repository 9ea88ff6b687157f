"""Backends that make a network: the kernel's emulator, its packet filter, or the switch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from ..errors import LabError, LabPermissionError, OptionError
from . import leftovers
from .job import spawn
from .netem import Netem
from .network import Link, Network
from .nft import Nft
from .switch import INSTEAD, Switch

BACKENDS: Final[dict[str, type[Switch]]] = {"netem": Netem, "nft": Nft, "switch": Switch}
"""In the order in which they are tried."""


def make(name: str, network: Network, environment: dict[str, str]) -> tuple[str, Switch]:
    """Makes a network by the backend that :func:`choose` chooses; returns its name and itself.
    LabError and LabPermissionError for what is missing."""
    name = choose(network, name=name)
    for command in BACKENDS[name].commands:
        if shutil.which(command) is None:
            raise LabError(f"the backend {name} needs the command {command}, which isn't there")
    return name, BACKENDS[name](network, environment)


def choose(*networks: Network, name: str = "auto") -> str:
    """The backend ``name`` or, for "auto", the first that this machine has, if it can make all of
    the networks. OptionError for a name there isn't, LabError for a network that it can't make."""
    if name != "auto" and name not in BACKENDS:
        raise OptionError(f"no backend is called {name!r}; there are auto, {', '.join(BACKENDS)}")
    for each in BACKENDS if name == "auto" else (name,):
        why = next(filter(None, (BACKENDS[each].refusal(network) for network in networks)), "")
        if not why and (each == name or not missing(each)):
            return each
        if each == name:
            raise LabError(why)
    raise LabPermissionError(missing("switch"))


@functools.cache
def missing(name: str) -> str:
    """Lack of this machine for a backend, as a sentence; empty if it has it all. Tried out, not
    looked up: what a kernel has isn't always what it allows."""
    environment = {**os.environ, leftovers.MARK: leftovers.new_name()}
    try:
        _, backend = make(name, Network(link=Link(loss=0.5, burst=2)), environment)
    except LabError as error:
        text = str(error)
        if "qdisc kind is unknown" in text:
            return f"this kernel has no netem ({text})"
        return text
    backend.close()
    return ""


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
    problem = ""
    try:
        spawn([sys.executable, "-I", "-S", "-c", ""], stderr=subprocess.DEVNULL).wait()
    except LabError as error:
        problem = str(error)
    out.append(Capability("interpreter", not problem, problem or sys.executable))
    for name in BACKENDS:
        why = missing(name)
        out.append(Capability(f"backend {name}", not why, why or BACKENDS[name].meaning))
    for command in ("ip", "tc", "nft", "ethtool"):
        where, lacks = shutil.which(command), "not there; the backends say who needs it"
        out.append(Capability(command, where is not None, where or lacks))
    left = [one for one in leftovers.find() if not one.alive]
    text = ", ".join(f"{one.pid} ({one.command[:40]})" for one in left)
    out.append(Capability("leftovers", not left, text or "none"))
    if missing("switch"):
        out.append(Capability("instead", True, INSTEAD))
    return out


def can_run(findings: list[Capability]) -> bool:
    return any(one.good for one in findings if one.name in ("backend netem", "backend switch"))

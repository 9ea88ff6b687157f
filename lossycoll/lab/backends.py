"""What can make a network: the kernel's emulator, its packet filter, or the switch."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Final, Protocol

from ..errors import LabError, LabPermissionError, OptionError
from . import leftovers
from .counters import Counters
from .netem import Netem
from .network import Link, Network
from .nft import Nft
from .switch import Switch


class Backend(Protocol):
    """What a laboratory needs of whatever makes its network."""

    def inside(self, number: int, command: list[str]) -> list[str]:
        """The command that runs ``command`` on a host."""

    def change(self, network: Network) -> None:
        """Puts other links and ports in force."""

    def counters(self) -> Counters:
        """What was counted since the start."""

    def close(self) -> None:
        """Ends everything. May be called again."""


BACKENDS: Final = {
    "netem": "the kernel's emulator: nearly everything; few kernels have it",
    "nft": "the kernel's packet filter: loss alone, at full speed",
    "switch": "a process of our own: everything, and the same seed loses the same packets",
}
"""In the order in which they are tried."""
_COMMANDS: Final = {
    "netem": ("ip", "tc", "ethtool"),
    "nft": ("ip", "nft", "ethtool"),
    "switch": (),
}
_MAKERS: Final[dict[str, Callable[[Network, dict[str, str]], Backend]]] = {
    "netem": Netem,
    "nft": Nft,
    "switch": Switch,
}


def make(name: str, network: Network, environment: dict[str, str]) -> tuple[str, Backend]:
    """Makes a network by the backend ``name``, or by the first that can, for "auto".

    Returns the name and the backend. Raises OptionError for a name there isn't, LabError and
    LabPermissionError for what is missing.
    """
    if name != "auto" and name not in BACKENDS:
        raise OptionError(f"no backend is called {name!r}; there are auto, {', '.join(BACKENDS)}")
    if name == "auto":
        name = choose(network)
    for command in _COMMANDS[name]:
        if shutil.which(command) is None:
            raise LabError(f"the backend {name} needs the command {command}, which isn't there")
    return name, _MAKERS[name](network, environment)


def choose(network: Network) -> str:
    """The first backend that this machine has and that can make the network."""
    for name in BACKENDS:
        if (name != "nft" or network.only_loses) and not missing(name):
            return name
    raise LabPermissionError(missing("switch"))


@functools.cache
def missing(name: str) -> str:
    """What this machine lacks for a backend, as a sentence; empty if it has it all.

    Tried out, not looked up: what a kernel has isn't always what it allows.
    """
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

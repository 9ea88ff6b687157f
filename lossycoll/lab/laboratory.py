"""A laboratory while it runs: its hosts, what runs on them, and its network, which can change."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from ..errors import LabError
from .counters import Counters
from .network import Network
from .profiles import profile
from .ranks import Ended, run_ranks
from .switch import Switch
from .tables import address_of

INTERFACE: Final = "eth0"
"""Of every host."""
MARK: Final = "LAB_OF_LOSSYCOLL"
"""The variable that says to which laboratory a process belongs: its name ends with the number of
the process that made it. Options begin with LOSSYCOLL_, so this doesn't."""


class Lab:
    """Hosts and the network between them; a ``with`` block that leaves nothing behind.

    ``network``: a :class:`Network`, or the name of a profile, of which ``changes`` replaces parts
    (``Lab("cross-dc", hosts=4)``). Host i has the address of :func:`address`.

    Hosts are namespaces without a name that a process of the laboratory holds: when that ends they
    are gone, and it ends with this one, however that ends. What still runs on them is then killed.

    Raises OptionError for a network that can't be, LabPermissionError without the rights that it
    takes, LabError for anything else that is missing.
    """

    def __init__(self, network: Network | str = "clean", **changes: Any) -> None:
        if isinstance(network, str):
            network = profile(network)
        self._network = network.with_parts(**changes) if changes else network
        self.name = f"{secrets.token_hex(4)}-{os.getpid()}"
        self._switch: Switch | None = None

    def __enter__(self) -> Lab:
        if self._switch is not None:
            raise LabError(f"laboratory {self.name} was started before; make another one")
        self._switch = Switch(self._network, self._environment({}))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running().close()

    @property
    def network(self) -> Network:
        """The network as it is now."""
        return self._network

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of a host."""
        return address_of(host)

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        **rest: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host; ``rest`` as for subprocess.Popen.

        ``environment``: changes to this process's; None takes a variable away. The process leads
        a session of its own, and is killed when the laboratory ends.
        """
        self._network.check_host(host)
        inside = self._running().inside(host, list(command))
        rest.setdefault("start_new_session", True)
        return subprocess.Popen(inside, env=self._environment(environment or {}), **rest)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        **rest: Any,
    ) -> list[Ended]:
        """Runs a command on every host, each a rank of one job, and returns when all have ended.

        ``rest`` as for :func:`ranks.run_ranks`, which has the variables that the ranks are given.
        """
        return run_ranks(self, command, environment or {}, **rest)

    def change(self, pair: tuple[int, int] | None = None, **changes: Any) -> None:
        """Changes a link, or all of them, while the laboratory runs; returns when it is in force.

        ``changes`` are fields of :class:`Link`. Packets on their way keep the delay they left with.
        """
        self._change(self._network.with_link(pair, **changes))

    def change_port(self, host: int | None = None, **changes: Any) -> None:
        """Changes a host's port, or all of them; ``changes`` are fields of :class:`Port`."""
        self._change(self._network.with_port(host, **changes))

    def counters(self) -> Counters:
        """What was counted since the start; after the end, up to the end."""
        return self._running().counters()

    def _change(self, network: Network) -> None:
        self._running().change(network)
        self._network = network

    def _running(self) -> Switch:
        if self._switch is None:
            raise LabError(f"laboratory {self.name} isn't started; use it in a with block")
        return self._switch

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        merged = {**os.environ, **changes, MARK: self.name}
        return {name: value for name, value in merged.items() if value is not None}

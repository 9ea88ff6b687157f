"""A laboratory while it runs: its hosts, what runs on them, and its network, which can change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from ..errors import LabError
from . import leftovers
from .backends import Backend, make
from .counters import Counters
from .job import Ended, run_ranks
from .network import Network
from .profiles import profile
from .switch_memory import address_of

INTERFACE: Final = "eth0"
"""Of every host."""


class Lab:
    """Hosts and the network between them; a ``with`` block that leaves nothing behind.

    ``network``: a :class:`Network`, or the name of a profile, of which ``changes`` replaces parts
    (``Lab("cross-dc", hosts=4)``). Host i has the address of :func:`address`. ``backend``: what
    makes the network, "switch", "nft", "netem" or "auto" (backends.py).

    Hosts are namespaces without a name that a process of the laboratory holds: when that ends they
    are gone, and it ends with this one, however that ends. What still runs on them is then killed.

    Raises OptionError for a network that can't be, LabPermissionError without the rights that it
    takes, LabError for anything else that is missing.
    """

    def __init__(
        self, network: Network | str = "clean", *, backend: str = "switch", **changes: Any
    ) -> None:
        if isinstance(network, str):
            network = profile(network)
        self._network = network.with_parts(**changes) if changes else network
        self.name = leftovers.new_name()
        self.backend = backend
        self._made: Backend | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        if self._made is not None:
            raise LabError(f"laboratory {self.name} was started before; make another one")
        leftovers.clean()
        self.backend, self._made = make(self.backend, self._network, self._environment({}))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # Its switch would do so, but for those that are still about to enter their host.
            for process in self._started:
                if process.poll() is None:
                    process.kill()
        finally:
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
        process = subprocess.Popen(inside, env=self._environment(environment or {}), **rest)
        self._started = [one for one in self._started if one.poll() is None] + [process]
        return process

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

    def _running(self) -> Backend:
        if self._made is None:
            raise LabError(f"laboratory {self.name} isn't started; use it in a with block")
        return self._made

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        merged = {**os.environ, **changes, leftovers.MARK: self.name}
        return {name: value for name, value in merged.items() if value is not None}

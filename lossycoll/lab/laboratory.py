"""A laboratory while it runs: its hosts, what runs on them, and its network, which can change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LabError, OptionError
from . import leftovers
from .backends import make
from .counters import Counters
from .job import Ended, run_ranks, spawn
from .network import Network, address_of
from .profiles import profile
from .switch import Switch


class Lab:
    """Hosts and the network between them: a context that leaves nothing behind.

    Hosts are network namespaces without a name, which a process of the laboratory holds. They are
    gone when it ends, and it ends with this process, however that ends. What still runs on a host
    is then killed. docs/lab.md has the rest.
    """

    def __init__(
        self, network: Network | str = "clean", *, backend: str = "switch", **changes: Any
    ) -> None:
        if isinstance(network, str):
            network = profile(network)
        self.network = network.with_parts(**changes)
        self.name = leftovers.new_name()
        self.backend = backend
        self._made: Switch | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        if self._made is not None:
            raise LabError(f"laboratory {self.name} was started before; make another one")
        leftovers.clean()
        self.backend, self._made = make(self.backend, self.network, self._environment({}))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Its switch would do so, but for those that are still about to enter their host.
            for process in self._started:
                if process.poll() is None:
                    process.kill()
        finally:
            self._running().close()

    address = staticmethod(address_of)

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        **rest: Any,
    ) -> subprocess.Popen[Any]:
        self.network.check_host(host)
        inside = self._running().inside(host, list(command))
        rest.setdefault("start_new_session", True)
        process = spawn(inside, env=self._environment(environment or {}), **rest)
        self._started = [one for one in self._started if one.poll() is None] + [process]
        return process

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        **rest: Any,
    ) -> list[Ended]:
        return run_ranks(self, command, environment or {}, **rest)

    def change(self, pair: tuple[int, int] | None = None, **changes: Any) -> None:
        """Changes links while the laboratory runs; returns when that is in force. Packets on their
        way keep the delay that they left with."""
        self._change(self.network.with_link(pair, **changes))

    def change_wan(self, **changes: Any) -> None:
        self._change(self.network.with_wan(**changes))

    def change_port(self, host: int | None = None, **changes: Any) -> None:
        self._change(self.network.with_port(host, **changes))

    def change_to(self, network: Network) -> None:
        mine = self.network
        if (network.sites, network.ranks_by_host) != (mine.sites, mine.ranks_by_host):
            raise OptionError("a laboratory can't change its hosts, sites or ranks while it runs")
        self._change(network)

    def counters(self) -> Counters:
        """Counts since the start; after the end, up to the end."""
        return self._running().counters()

    def _change(self, network: Network) -> None:
        self._running().change(network)
        self.network = network

    def _running(self) -> Switch:
        if self._made is None:
            raise LabError(f"laboratory {self.name} isn't started; use it in a with statement")
        return self._made

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        merged = {**os.environ, **changes, leftovers.MARK: self.name}
        return {name: value for name, value in merged.items() if value is not None}

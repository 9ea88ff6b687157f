"""Endpoints of a peer: an engine, and what goes by its socket, for each of the peer's numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret

from .client import DirectoryClient, Listener
from .ice_agent import key_of
from .nat_agent import NatAgent
from .paths import Paths
from .protocol import MOST_PEERS, Here, Transfer
from .state_transfer import Offered, StateTransfers


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Engine of a peer under one of its numbers, and what goes by its socket. ``place``: the
    socket's address, as this machine sees it."""

    place: Address
    nat_agent: NatAgent
    paths: Paths
    transfers: StateTransfers

    def close(self) -> None:
        """Others may have to ask for packets no more. Idempotent."""
        self.nat_agent.close()
        self.transfers.close()
        self.paths.close()


@dataclass(eq=False)
class Endpoints(Listener):
    """Endpoints of a peer by its present number, and those by its former ones. Any thread may call.
    Packets of a number that a peer had would be taken for those of another: so it opens an endpoint
    for each number that a directory gives it. ``asks_reflexive``: directories know reflexive
    addresses; ``keepalive``: seconds between two signs of life."""

    client: DirectoryClient
    session: str
    address: str
    payload_bytes: int
    secret: Secret | None
    options: Options
    asks_reflexive: bool
    keepalive: float

    def __post_init__(self) -> None:
        self.offered = Offered()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """No two are opened at once, nor one for a number that is another's by then."""
        self._all: list[Endpoint] = []
        """By former numbers, of which others may still ask for packets; last the present one."""
        self.client.listener = self
        with self._opening:
            assert self.client.joined is not None
            self._open(self.client.joined.number)

    @property
    def now(self) -> Endpoint:
        return self._all[-1]

    def all(self) -> list[Endpoint]:
        with self._lock:
            return list(self._all)

    def joined(self, number: int) -> None:
        """A directory has given a number. A round or a transfer that is on ends as it was."""
        with self._opening:
            if not self._all:  # the first one hasn't been opened
                return
            if number == self.now.paths.number:  # this directory may see the socket otherwise
                self.now.nat_agent.ask()
                return
            try:
                self._open(number)
            except EngineError:  # of the ports that there may be, the former has the last
                for one in self.all():
                    one.close()
                self._open(number)

    def _open(self, number: int) -> None:
        session, secret = self.session, self.secret
        options, payload = self.options, self.payload_bytes
        host = Host(number, MOST_PEERS, self.address, payload_bytes=payload, options=options)
        try:
            if secret is not None:
                host.seal(b"", secret.filter(session))
            out_of_band = host.out_of_band()
            place = (self.address, host.link().port)
            places = [place if one == number else None for one in range(MOST_PEERS)]
            host.start(int(session, 16), places)
        except BaseException:
            host.close()
            raise
        nat_agent = NatAgent(
            out_of_band,
            number,
            key_of(secret, session),
            lambda: self.client.directories.places[0] if self.asks_reflexive else None,
            lambda reflexive, moved: self.say_address(place, reflexive, moved),
            self.keepalive,
        )
        paths = Paths(host, session, secret, options, nat_agent, self.client.report_unreachable)
        transfers = StateTransfers(paths, payload, self.offered)
        with self._lock:
            self._all.append(Endpoint(place, nat_agent, paths, transfers))
        self.say_address(place, nat_agent.reflexive_address() or place, False)

    def say_address(self, place: Address, reflexive: Address, moved: bool) -> None:
        """Tell the directory the reflexive address of the engine at ``place``. NAT agents' threads
        call it, too."""
        with self._lock:
            if not self._all or self.now.place != place:
                return  # one that this peer had by another number
            self.client.say(Here(*place, () if reflexive == place else (reflexive,)))
        if moved:  # and so are the routes that others know
            self.client.renew()

    def gone(self, incarnation: str) -> None:
        for endpoint in self.all():
            endpoint.paths.gone(incarnation)

    def met(self, incarnations: Sequence[str]) -> None:
        for endpoint in self.all():
            endpoint.paths.confirm_alive(incarnations)

    def donate(self, transfer: Transfer) -> None:
        for endpoint in self.all()[-1:]:
            endpoint.transfers.donate(transfer)

    def close_former(self) -> None:
        with self._lock:
            former, self._all = self._all[:-1], self._all[-1:]
        for endpoint in former:
            endpoint.close()

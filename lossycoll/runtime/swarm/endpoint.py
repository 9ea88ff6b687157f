"""Endpoints of a peer: an engine, and what goes by its socket, for each of the peer's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret

from .client import DirectoryClient
from .connectivity import key_of
from .nat_agent import NatAgent
from .paths import Paths
from .protocol import MOST_PEERS, Here
from .state import Snapshot
from .state_transfer import StateTransfers


@dataclass(frozen=True, slots=True)
class PeerEndpoint:
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


class Endpoints:
    """Endpoints of a peer by its present number, and those by its former ones. Any thread may call.
    Packets of a number that a peer had would be taken for those of another: so it opens an endpoint
    for each number that a directory gives it. ``asks_reflexive``: directories know reflexive
    addresses; ``keepalive``: seconds between two signs of life."""

    def __init__(
        self,
        client: DirectoryClient,
        *,
        session: str,
        address: str,
        payload_bytes: int,
        secret: Secret | None,
        options: Options,
        asks_reflexive: bool,
        keepalive: float,
    ) -> None:
        self._client = client
        self._session, self._address, self._payload = session, address, payload_bytes
        self._secret, self._options = secret, options
        self._asks_reflexive, self._keepalive = asks_reflexive, keepalive
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """No two are opened at once, nor one for a number that is another's by then."""
        self.number = -1
        self.now: PeerEndpoint | None = None
        """The present one; None: closed or not yet open."""
        self._former: list[PeerEndpoint] = []
        """Endpoints of its former numbers: others may still ask for packets."""

    def all(self) -> list[PeerEndpoint]:
        with self._lock:
            return [*self._former, *([self.now] if self.now is not None else [])]

    def open(self, number: Callable[[], int]) -> None:
        """Opens the first one, for the number that the peer has by then."""
        with self._opening:
            self._open(number())

    def follow(self, number: int) -> None:
        """A directory has given a number. A round or a transfer that is on ends as it was."""
        with self._opening:
            endpoint = self.now
            if endpoint is None:  # it is about to be opened, or closed
                return
            if number == self.number:  # this directory may see the socket otherwise
                endpoint.nat_agent.ask()
                return
            with self._lock:
                self._former.append(endpoint)
            try:
                self._open(number)
            except EngineError:  # of the ports that there may be, the former has the last
                self.close_former()
                self._open(number)

    def _open(self, number: int) -> None:
        self.number = number
        session, secret, options = self._session, self._secret, self._options
        host = Host(number, MOST_PEERS, self._address, payload_bytes=self._payload, options=options)
        try:
            if secret is not None:
                host.seal(b"", secret.filter(session))
            out_of_band = host.out_of_band()
            place = (self._address, host.link().port)
            places = [place if one == number else None for one in range(MOST_PEERS)]
            host.start(int(session, 16), places)
        except BaseException:
            host.close()
            raise
        nat_agent = NatAgent(
            out_of_band,
            number,
            key_of(secret, session),
            lambda: self._client.directories[0] if self._asks_reflexive else None,
            lambda reflexive, moved: self.say_address(place, reflexive, moved),
            self._keepalive,
        )
        unreachable = self._client.report_unreachable
        paths = Paths(host, number, session, secret, options, nat_agent, unreachable)
        transfers = StateTransfers(number, paths, self._payload)
        with self._lock:
            if self.now is not None:
                former = self.now.transfers
                transfers.schema, transfers.state = former.schema, former.state
            self.now = PeerEndpoint(place, nat_agent, paths, transfers)
        self.say_address(place, nat_agent.reflexive_address() or place, False)

    def say_address(self, place: Address, reflexive: Address, moved: bool) -> None:
        """Tell the directory the reflexive address of the engine at ``place``. NAT agents' threads
        call it, too."""
        with self._lock:
            if self.now is None or self.now.place != place:
                return  # one that this peer had by another number
            self._client.say(Here(*place, () if reflexive == place else (reflexive,)))
        if moved:  # and so are the routes that others know
            self._client.renew()

    def average(self, schema: str) -> None:
        """The peer averages that from now on: its transfers are of such states."""
        with self._lock:
            if self.now is not None:
                self.now.transfers.schema = schema

    def offer(self, state: Callable[[], Snapshot] | None) -> bool:
        """Joiners get this state from now on; None: none. Returns whether that is news."""
        with self._lock:
            if self.now is None:
                return False
            transfers = self.now.transfers
            had, transfers.state = transfers.state, state
            return had is not None or state is not None

    def close_former(self) -> None:
        with self._lock:
            former, self._former = self._former, []
        for endpoint in former:
            endpoint.close()

    def forget(self) -> None:
        self.now, self._former = None, []

"""Engines whose packets are sealed, and a relay between them that sees all of it."""

from __future__ import annotations

from typing import Any

from lossycoll.runtime.keys.secret import Secret

from .network import SESSION, Network
from .relay import PAYLOAD, Faults, Relay, RelayedNetwork

SECRET = Secret.of(b"a secret of tests")


def seal(network: Network, addresses: list[tuple[str, int]], secret: Secret, meeting: str) -> None:
    """Starts a network's hosts, sealed."""
    for rank, host in enumerate(network.hosts):
        host.seal(secret.path_secrets(meeting, rank, network.world), secret.filter(meeting))
        host.start(SESSION, addresses)


class SealedNetwork(Network):
    """Engines on loopback, sealed."""

    def start(self, addresses: list[tuple[str, int]]) -> None:
        """As of all networks."""
        seal(self, addresses, SECRET, "a meeting")


class SealedRelay(Relay):
    """What is sealed can't be taken apart: whole datagrams pass."""

    @staticmethod
    def packets(datagram: bytes) -> list[bytes]:
        """The datagram alone."""
        return [datagram]


class SealedRelayedNetwork(RelayedNetwork):
    """Sealed engines that know each other by the relay's ports.

    Args:
        world: Ranks.
        faults: The relay's.
        meeting: Of the ranks; another one has other keys.
        options: The engines'.
    """

    def __init__(
        self, world: int, faults: Faults, *, meeting: str = "a meeting", **options: Any
    ) -> None:
        self._meeting = meeting
        super().__init__(world, faults, PAYLOAD, **options)

    def start(self, addresses: list[tuple[str, int]]) -> None:
        """As of all networks."""
        seal(self, addresses, SECRET, self._meeting)

    def introduce(self, ports: list[int]) -> list[tuple[str, int]]:
        """As of all relayed networks."""
        self.relay = SealedRelay(ports, self.faults)
        return self.relay.addresses

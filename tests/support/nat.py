"""Address translators as data: what becomes of a datagram's addresses on its way out and in.

The names are those of RFC 4787: a cone gives an inner place one outer port whatever it sends to, a
symmetric one gives it another for each destination. Both let in only what comes from where
something was sent to from that port (address- and port-dependent filtering), unless ``open``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Address = tuple[str, int]


@dataclass
class _Mapping:
    inner: Address
    port: int
    used: float
    """When something last went out by it."""
    sent_to: set[Address] = field(default_factory=set)


@dataclass
class Nat:
    """``life``: seconds after which a mapping by which nothing went out is gone. The first ports
    are those after ``first_port``."""

    address: str
    clock: Callable[[], float]
    symmetric: bool = False
    open: bool = False
    life: float = 1e9
    first_port: int = 40_000
    filtered: int = 0
    """What came in from a place that nothing was sent to."""
    unknown: int = 0
    """What came to a port that is nobody's, or isn't any more."""
    expired: int = 0
    _mappings: dict[tuple[Address, Address | None], _Mapping] = field(default_factory=dict)
    _by_port: dict[int, _Mapping] = field(default_factory=dict)

    def out(self, inner: Address, to: Address) -> Address:
        """Where the world sees it come from."""
        self._expire()
        key = inner, to if self.symmetric else None
        found = self._mappings.get(key)
        if found is None:
            self.first_port += 1
            found = _Mapping(inner, self.first_port, 0.0)
            self._mappings[key] = self._by_port[found.port] = found
        found.used = self.clock()
        found.sent_to.add(to)
        return self.address, found.port

    def into(self, port: int, source: Address) -> Address | None:
        """Whom it is for; None: it is dropped."""
        self._expire()
        found = self._by_port.get(port)
        if found is None:
            self.unknown += 1
            return None
        if not self.open and source not in found.sent_to:
            self.filtered += 1
            return None
        return found.inner

    def _expire(self) -> None:
        now = self.clock()
        for key, one in list(self._mappings.items()):
            if now - one.used > self.life:
                self.expired += 1
                del self._mappings[key], self._by_port[one.port]

    def restart(self) -> None:
        """It has lost all that it knew."""
        self._mappings.clear()
        self._by_port.clear()

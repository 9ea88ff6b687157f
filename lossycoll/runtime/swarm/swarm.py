"""A swarm of peers without a fixed world, as a script joins it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final

from lossycoll.errors import OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.core.exits import close_at_exit
from lossycoll.runtime.engine.failures import place_of, place_text
from lossycoll.runtime.keys.aead import check_library
from lossycoll.runtime.keys.secret import find_secret, secret_of
from lossycoll.runtime.net.interfaces import choose

from .directory import FIRST_GRACE
from .directory_list import ANY_ADDRESS, LOOPBACK, Begin
from .member import ASK_SECONDS, SwarmMember
from .protocol import Serves
from .server import DirectoryServer, Ports, bound, bound_to
from .service import Owner
from .valkey_relay import ValkeyRelay
from .valkey_server import SCHEME, ValkeyUrl

POLL_SECONDS: Final = 0.05
MOST_RATE: Final = 1e12
log: Final = logging.getLogger("lossycoll")


class Swarm:
    """Context manager that makes this process a peer of a swarm.

    The first peer listens, and others join it. Joining peers that also listen take over the
    directory if the first one ends. Without ``listen`` and ``join``, the swarm is this peer alone.
    Alternatively all peers, the first one too, join a valkey server, and none listens.
    docs/swarms.md is the guide.

    With both ``listen`` and ``join``, all peers may pass the same list of directories, which
    includes their own. If none of these has a swarm for 8 s, the first live one by address begins a
    swarm, and the others join it.

    Args:
        listen: ``host:port`` of this peer's directory; port 0: any free port. Empty: no directory.
        join: ``host:port`` of each directory to try; the first one that answers is used. Or one
            address ``valkey://user:password@host:port/prefix``, at which the swarm of this prefix
            meets.
        secret: Secret that all peers share, 16 to 4,096 bytes. None: the secret in
            ``LOSSYCOLL_SECRET`` or ``LOSSYCOLL_SECRET_FILE``. Without a secret, all traffic is
            unencrypted.
        name: This peer's name, unique among live peers. Empty: made of host and process.
        options: Options of the engine; None: the environment's.
        bandwidth: Bytes/s of this peer's link, in its slower direction. If all peers of a group
            give one, peers with slower links own smaller parts of the mean. 0: the option ``pace``,
            if it is set.
        timeout: Seconds to join the swarm.
        may_serve: Whether a peer that doesn't listen may open a directory after all others have
            gone. It reserves a port for that. Peers that meet at a valkey server reserve none.

    Raises:
        OptionError: An address, the secret or an option is invalid, or the valkey package isn't
            installed.
        RendezvousError: No directory answers, the directory refuses this peer, or the port is
            taken.
        EngineError: The socket can't be opened.
    """

    def __init__(
        self,
        listen: str = "",
        join: Sequence[str] = (),
        *,
        secret: str | None = None,
        name: str = "",
        options: Options | None = None,
        bandwidth: float = 0.0,
        timeout: float = 30.0,
        may_serve: bool = True,
    ) -> None:
        if not 0 <= bandwidth <= MOST_RATE:
            raise OptionError(f"bandwidth is {bandwidth}, wanted 0 to {MOST_RATE:g} bytes/s")
        if isinstance(join, str):
            raise OptionError(f"join is {join!r}, wanted a list of host:port")
        address = _server_of(listen, join)
        found = find_secret() if secret is None else secret_of(secret)
        options = Options.resolve(options)
        if found is not None:
            check_library(options.libcrypto, options.cipher)
        places = [numeric_place(one) for one in join if address is None]
        host, port = numeric_place(listen or "127.0.0.1:0")
        is_any = host in ANY_ADDRESS
        self._member: SwarmMember | None = None
        self._server: DirectoryServer | None = None
        self._reserved: Ports | None = None
        self._relay = None if address is None else ValkeyRelay(address, found)
        self._secret = found
        self.name: str = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._has_begun = False
        self._join = join
        close_at_exit(self.close)
        try:
            begin: Begin | None = None
            if address is not None:
                places = [numeric_place(place_text(address.host, address.port))]
            elif listen or not join:
                places, begin = self._listen(host, port, places, options.interface)
            self._member = SwarmMember(
                places,
                name=self.name,
                secret=found,
                options=options,
                timeout=timeout,
                own_directory=is_any and not join,
                rate=int(bandwidth or options.pace),
                transport=self._relay,
                begin=begin,
            )
            if self._server is not None:
                joins = bool(join) and not self._has_begun
                self._serve(self._member.address if is_any else host, joins=joins)
            elif may_serve and self._relay is None:  # there the notice says who serves
                self._reserve(self._member)
        except BaseException:
            self.close()
            raise

    def _listen(
        self, host: str, port: int, others: list[Address], interface: str
    ) -> tuple[list[Address], Begin | None]:
        """Open a directory. Returns the directories to ask, and the right to begin a swarm."""
        self._server = DirectoryServer(host, port, self._secret, owner=self._owner(bool(others)))
        # One that comes back hears from its own whom the swarm has turned to meanwhile.
        own = LOOPBACK[":" in host] if host in ANY_ADDRESS else host, self._server.port
        if not others:
            return [own], None
        known_as = _known_as(host, self._server.port, others, interface)
        rest = [one for one in others if one not in (own, known_as)]
        return [*rest, own], Begin(own, known_as, self._begin)

    def _serve(self, host: str, *, joins: bool) -> None:
        """Others hear of this peer's directory; one that has joined another's stands by."""
        assert self._server is not None
        self._address = place_text(host, self._server.port)
        if self._secret is None and not ip_address(host.partition("%")[0]).is_loopback:
            log.warning(
                "peer %r listens at %s without a secret: whoever reaches it can join and change "
                "results; set LOSSYCOLL_SECRET on all peers (`lossycoll keygen` makes one)",
                self.name,
                self._address,
            )
        if joins:
            self._server.adopt(self.member.session)
        self.member.client.say(Serves(host, self._server.port))
        self.member.client.directories.may_open((host, self._server.port), lambda: None)

    def _begin(self) -> None:
        """Begin a swarm, for nobody who was to be joined has one. The client's thread calls it,
        maybe more than once."""
        assert self._server is not None
        if not self._has_begun:
            self._has_begun = True
            self._server.begin()
            places = ", ".join(self._join)
            log.warning("peer %r begins a swarm: none of %s has one", self.name, places)

    def _reserve(self, member: SwarmMember) -> None:
        """Take a port for a directory, which this peer opens if there is no other."""
        try:
            self._reserved = bound_to(member.address, 0)
        except RendezvousError as error:
            log.warning("peer %r may not serve: %s", self.name, error)
            return
        place = member.address, self._reserved.port
        member.client.directories.may_open(place, lambda: self._open(member, place))
        member.client.say(Serves(*place, spare=1))

    def _open(self, member: SwarmMember, place: Address) -> None:
        """Open a directory. The client's thread calls it, maybe more than once."""
        if self._server is not None:
            return
        ports, self._reserved = self._reserved, None
        self._server = DirectoryServer(
            *place, self._secret, session=member.session, owner=self._owner(True), bound=ports
        )
        self._address = place_text(*place)
        log.info("peer %r has opened a directory at %s", self.name, self._address)
        member.client.say(Serves(*place))

    def _owner(self, standby: bool) -> Owner:
        return Owner(self.name, lambda: self._member.client if self._member else None, standby)

    @property
    def address(self) -> str:
        """``host:port`` at which others join this peer's directory.

        Raises:
            RendezvousError: This peer doesn't listen, so it has none.
        """
        if self._server is None:
            raise RendezvousError(
                f"peer {self.name!r} doesn't listen: Swarm(listen='0.0.0.0:7000')"
            )
        return self._address

    @property
    def member(self) -> SwarmMember:
        """Endpoint of this peer in the engine, for averagers.

        Raises:
            RendezvousError: The swarm was closed.
        """
        if self._member is None:
            raise RendezvousError(f"peer {self.name!r} has left the swarm")
        return self._member

    def peers(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Return the names of the swarm's live peers.

        Args:
            timeout: Seconds.

        Returns:
            The names of all live peers, this one's included.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout``.
        """
        return self.member.client.names(timeout)

    def stats(self) -> dict[str, int]:
        """Return counts of messages to this peer and its directory that were rejected.

        Returns:
            Counts of bytes that aren't messages (``malformed``), of messages that the secret
            doesn't open (``forged``), and of messages from an unknown connection (``foreign``).
            Only a valkey server delivers the latter two: over TCP, a message that doesn't open ends
            the connection.
        """
        found = Counter(malformed=0, forged=0, foreign=0)
        if self._member is not None:
            found["malformed"] += self._member.client.malformed
        if self._server is not None:
            found.update(self._server.counts)
        if self._relay is not None:
            found.update(self._relay.counts)
        return dict(found)

    def wait_for(self, peers: int, timeout: float = 30.0) -> None:
        """Wait until ``peers`` peers are there. Once this peer has an averager, only peers with the
        same tensors and settings count.

        Args:
            peers: Number of peers, this one included.
            timeout: Seconds.

        Raises:
            RendezvousError: There are fewer after ``timeout``.
            OperationTimeout: The directory doesn't answer.
        """
        if self.member.said is not None:
            self.member.wait_for(peers, timeout)
            return
        end = time.monotonic() + timeout
        # A directory that is busy isn't one that doesn't answer.
        while len(found := self.peers(max(ASK_SECONDS, end - time.monotonic()))) < peers:
            if time.monotonic() >= end:
                raise RendezvousError(
                    f"peer {self.name!r}: {len(found)} peers after {timeout:g} s, wanted {peers}: "
                    f"{', '.join(found)}"
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Leave the swarm. Idempotent.

        A directory in use serves for at most 5 s more, until the others have had this peer's
        rounds.
        """
        atexit.unregister(self.close)
        if self._server is not None and self._member is not None and not self._member.averages_now:
            self._server.serve_on(FIRST_GRACE)
        if self._member is not None:
            self._member.close()
        # Until then its thread might open a directory with what is reserved.
        for part in (self._reserved, self._server, self._relay):
            if part is not None:
                part.close()
        self._member = self._reserved = None

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _known_as(host: str, port: int, others: Sequence[Address], interface: str) -> Address:
    """The address by which others name a directory that listens here. ``others``: directories that
    this peer is to join, and maybe its own."""
    if host not in ANY_ADDRESS:
        return host, port
    for place in others:
        if place[1] == port:
            with contextlib.suppress(OSError):  # it is another machine's
                bound(place[0], 0, socket.SOCK_DGRAM).close()
                return place
    return choose(interface, others[0][0]).address, port


def _server_of(listen: str, join: Sequence[str]) -> ValkeyUrl | None:
    """Return the address of the valkey server; None: there is none."""
    if not any(one.startswith(SCHEME) for one in join):
        return None
    if listen or len(join) > 1:
        raise OptionError(
            "a swarm that meets by a valkey server has this one place: "
            f"join=['{SCHEME}host:port/prefix'] on all peers, and no listen"
        )
    return ValkeyUrl.of(join[0])


def numeric_place(text: str) -> Address:
    """Numeric address and port of ``host:port``. OptionError: it is none. RendezvousError: nobody
    knows the host."""
    host, port = place_of(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: a label of it is empty or too long
        why = getattr(error, "strerror", None) or error
        raise RendezvousError(f"no address of {host!r}: {why}") from error
    return str(found[0][4][0]), port

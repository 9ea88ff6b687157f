"""A peer: an engine whose processes come and go, and rounds of averaging in small groups.

Long because calls, rounds and what the client's thread says meet in one object; the work is done by
the modules around it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from typing import Final, TypeAlias

import numpy as np

from lossycoll.errors import EngineError, LossyError, OperationTimeout, OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import Plan, signature
from lossycoll.runtime.collectives.operations import lossy_delivery
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.engine.binding import DType, EngineCall
from lossycoll.runtime.engine.failures import Where, place_text
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.payload import payload_bytes
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.net.interfaces import choose

from .client import DirectoryClient, Listener
from .directory_list import Begin
from .directory_transport import DirectoryTransport, ZmqDirectoryTransport
from .ice_agent import key_of
from .means import BoundedRound, MeanEncoding, MeanRound, Round
from .nat_agent import KEEPALIVE_SECONDS, NatAgent
from .paths import Floats, Paths, outcome
from .peer_status import PeerFile
from .protocol import MOST_PEERS, WHY_ABSENT, Averages, Group, Here, Member, Offers, Transfer
from .state_transfer import Offered, Snapshot, StateTransfers, TransferredState

MTU: Final = 1500  # MTU of all swarms: peers may be anywhere
ASK_SECONDS: Final = 2.0  # for the directory to say who is there, when no round has begun
Choose: TypeAlias = Callable[[int], tuple[int, Floats]]
"""Chooses the values of a round by its number: which part of all they are, and the values."""
NO_ROUND: Final = -1
log: Final = logging.getLogger("lossycoll")
LEAST_SECONDS: Final = 1.0  # for the values of a group, however long it took to form


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of one round of averaging.

    Attributes:
        round: The round's number; -1: none began.
        members: Numbers of the peers that began the round together, this one's included, in the
            order of the parts of the values that they owned.
        missing: Members that were lost during the round, or have no route.
        contributions: Average number of peers in the mean of a value; 0: all weights were 0.
        kept: Share of values that stayed as they were, since no mean of them came, or an impossible
            one.
        waited: Seconds until the group had formed.
        seconds: Seconds from then on.
        failure: Reason why nothing was averaged; "": something was.
        absent: Peers that were there but not in this round: the name of each, and the reason.
        left_out: Reason why this peer's values didn't count, whatever its weight; "": they did.
        samples: Samples of the swarm when the round began, as reported by the peers.
        refused: With ``max_norm``, numbers of the members some of whose values were rejected.
        newer: Samples of another peer's state that this peer must take before it averages again; 0:
            none.
    """

    round: int
    members: tuple[int, ...]
    missing: tuple[int, ...]
    contributions: float
    kept: float
    waited: float
    seconds: float
    failure: str = ""
    absent: tuple[tuple[str, str], ...] = ()
    left_out: str = ""
    samples: int = 0
    newer: int = 0
    refused: tuple[int, ...] = ()


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


class SwarmMember(Listener):
    """A peer of a swarm, from when it has joined until ``close``. Packets of a number that a peer
    had would be taken for those of another: so it opens an endpoint for each number that a
    directory gives it. ``directories``: (host, port) of
    each that may be asked. ``own_directory``: the directory listens on all of this machine's
    addresses, for others too. ``keepalive``: seconds between two signs of life to the directory's
    UDP port and to each peer. ``rate``: bytes/s of this peer's link; 0: unknown. ``transport``: to
    directories that know no reflexive addresses; None: the control transport. RendezvousError: no
    directory answers, or it refuses this peer. EngineError: the socket can't be opened."""

    def __init__(
        self,
        directories: Sequence[Address],
        *,
        name: str,
        secret: Secret | None = None,
        options: Options | None = None,
        timeout: float = 30.0,
        own_directory: bool = False,
        keepalive: float = KEEPALIVE_SECONDS,
        rate: int = 0,
        transport: DirectoryTransport | None = None,
        begin: Begin | None = None,
    ) -> None:
        self._options = self._delivery = options or Options(link="udp")
        self._secret, self._keepalive = secret, keepalive
        self._asks_reflexive = transport is None  # directories know reflexive addresses
        self._rate = rate
        self._rounds = threading.Lock()  # one round at a time
        self._unreachable: Sequence[Member] = ()  # members of the round that are out of reach
        self._max_norm = 0.0
        self.said: Averages | None = None  # averaged tensors, as accepted by the directory
        self._offer = Offers(0)
        self._offered = Offered()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """No two are opened at once, nor one for a number that is another's by then."""
        self._endpoints: list[Endpoint] = []
        """By former numbers, of which others may still ask for packets; last the present one."""
        self.client = DirectoryClient(
            directories, name, transport or ZmqDirectoryTransport(secret), begin
        )
        self._file: PeerFile | None = None
        try:
            joined = self.client.connect(timeout)
            self.session = joined.session
            if self._options.status == "on":
                self._file = PeerFile(self.session, name)
            # The directory of this very peer says nothing of the way to others.
            towards = None if own_directory else directories[0][0]
            self.address = choose(self._options.interface, towards).address
            self._payload = payload_bytes(MTU, 6 if ":" in self.address else 4)
            self.means = MeanEncoding(self._options.encoding, self._payload)
            self._plain = MeanEncoding("same", self._payload)
            self._has_told = False  # that packets carry plain floats
            self.client.listener = self
            with self._opening:
                self._open((self.client.joined or joined).number)
        except BaseException:
            self._leave()
            raise

    @property
    def number(self) -> int:
        return self._endpoint.paths.number

    @property
    def _endpoint(self) -> Endpoint:
        return self._endpoints[-1]

    def _leave(self) -> None:
        self.client.close()
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        # Before others hear that this peer has gone: then they wait for no packet of it.
        self._endpoint.paths.flush()
        self._leave()
        endpoints = self._all()
        for endpoint in endpoints:
            endpoint.nat_agent.close()
            endpoint.transfers.close()
            endpoint.paths.abort()
        with self._rounds:  # until whoever averages is out
            for endpoint in endpoints:
                endpoint.paths.close()

    def averages(
        self,
        schema: str,
        grid: str = "",
        timeout: float = 10.0,
        *,
        max_missing: float | None = None,
        wire: str | None = None,
        settings: str = "",
        draft: bool = False,
        max_norm: float = 0.0,
    ) -> None:
        """Says what this peer averages, before its first round.

        ``schema``, ``grid`` and ``settings``: as of :class:`.protocol.Averages`. ``max_missing``
        and ``wire``: the options of these names, unless the options have them. ``draft``:
        :meth:`settle` says the rest before the first round. ``max_norm``: as of
        :class:`.means.BoundedRound`; 0: all is believed. OptionError: ``max_norm`` with packets of
        few bits. RendezvousError: others average something else, or by another wire; the grid is
        too small. OperationTimeout: the directory doesn't answer within ``timeout`` seconds.
        """
        self.offers(None)  # of what it averaged before
        options = self._options
        if wire is not None and not options.is_given("wire"):
            options = replace(options, wire=wire)
        if max_norm and options.encoding != "same":
            raise OptionError(
                f"max_norm is {max_norm:g} and the wire {options.encoding}, wanted no wire with it"
            )
        self._max_norm = max_norm
        self._everywhere = options.link == "udp"
        said = options.encoding
        if self._everywhere and said != "same":
            said += " everywhere"  # so that a group doesn't have both kinds
        self._agree(Averages(schema, grid, said, self._rate, settings, int(draft)), timeout)
        self.means = MeanEncoding(options.encoding, self._payload)
        given = any(options.is_given(name) for name in ("max_missing", "repair", "fec"))
        self._delivery = options
        if max_missing is not None and not given:
            self._delivery = replace(options, max_missing=max_missing)

    def settle(self, schema: str, settings: str, target: int = 0, timeout: float = 10.0) -> None:
        """Says all of what this peer averages, after a draft. ``target``: as of
        :class:`.protocol.Averages`. Errors as of :meth:`averages`."""
        said = self._has_said()
        wanted = replace(said, schema=schema, settings=settings, draft=0, peers=0, target=target)
        if wanted != said:
            self._agree(wanted, timeout)

    def _has_said(self) -> Averages:
        if self.said is None:
            raise RendezvousError(f"peer {self.number} hasn't said what it averages")
        return self.said

    def _agree(self, wanted: Averages, timeout: float) -> None:
        self.client.averages(wanted, timeout)
        self.said, self._offered.schema = wanted, wanted.schema

    @property
    def averages_now(self) -> bool:
        return self._rounds.locked()

    def wait_for(self, peers: int, timeout: float) -> None:
        """Returns when so many peers average the same, this one included. RendezvousError: there
        are fewer after ``timeout`` seconds, or this one hasn't said what it averages.
        OperationTimeout: the directory doesn't answer."""
        wanted = replace(self._has_said(), peers=peers)
        try:
            self.client.averages(wanted, timeout)
        except OperationTimeout:
            found = self.client.names(ASK_SECONDS)
            raise RendezvousError(
                f"peer {self.number}: after {timeout:g} s fewer than {peers} peers average the "
                f"same; {len(found)} are there: {', '.join(found)}"
            ) from None

    # ---- endpoints ----

    def _all(self) -> list[Endpoint]:
        with self._lock:
            return list(self._endpoints)

    def joined(self, number: int) -> None:
        """A directory has given a number. A round or a transfer that is on ends as it was."""
        with self._opening:
            if not self._endpoints:  # the first one hasn't been opened
                return
            if number == self.number:  # this directory may see the socket otherwise
                self._endpoint.nat_agent.ask()
                return
            try:
                self._open(number)
            except EngineError:  # of the ports that there may be, the former has the last
                for one in self._all():
                    one.close()
                self._open(number)

    def _open(self, number: int) -> None:
        session, secret, options = self.session, self._secret, self._options
        host = Host(number, MOST_PEERS, self.address, payload_bytes=self._payload, options=options)
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
            lambda: self.client.directories.places[0] if self._asks_reflexive else None,
            lambda reflexive, moved: self.say_address(place, reflexive, moved),
            self._keepalive,
        )
        paths = Paths(host, session, secret, options, nat_agent, self.client.report_unreachable)
        transfers = StateTransfers(paths, self._payload, self._offered)
        with self._lock:
            self._endpoints.append(Endpoint(place, nat_agent, paths, transfers))
        self.say_address(place, nat_agent.reflexive_address() or place, False)

    def say_address(self, place: Address, reflexive: Address, moved: bool) -> None:
        """Tell the directory the reflexive address of the engine at ``place``. NAT agents' threads
        call it, too."""
        with self._lock:
            if not self._endpoints or self._endpoint.place != place:
                return  # one that this peer had by another number
            self.client.say(Here(*place, () if reflexive == place else (reflexive,)))
        if moved:  # and so are the routes that others know
            self.client.renew()

    def gone(self, incarnation: str) -> None:
        for endpoint in self._all():
            endpoint.paths.gone(incarnation)

    def met(self, incarnations: Sequence[str]) -> None:
        for endpoint in self._all():
            endpoint.paths.confirm_alive(incarnations)

    def donate(self, transfer: Transfer) -> None:
        for endpoint in self._all()[-1:]:
            endpoint.transfers.donate(transfer)

    # ---- states ----

    def offers(self, state: Callable[[], Snapshot] | None) -> None:
        """Offer this peer's state to newcomers from now on. ``state``: makes it, on a thread of
        this peer, whenever a joiner asks; None: nothing any more."""
        had, self._offered.state = self._offered.state, state
        if had is not None or state is not None:
            self._say_offer(replace(self._offer, has=int(state is not None)))

    def progress(self, samples: int, since: int, *, claims: bool = False) -> None:
        self._say_offer(Offers(self._offer.has, samples, since, int(claims)))

    def _say_offer(self, offer: Offers) -> None:
        self._offer = offer
        self.client.say(offer)

    def fetch_state(
        self, own: Snapshot | None, donors: int, most: int, timeout: float = 10.0
    ) -> TransferredState | None:
        """Take the state of others, or ``own`` if none is newer; None: nobody has one.
        OperationTimeout: the directory doesn't answer, or the state doesn't come in time.
        LossyError: no donor has all of it, or none is there any more."""
        begin = time.monotonic()
        transfers = self.client.transfers(donors, timeout)
        if not transfers:
            return None
        left = max(LEAST_SECONDS, begin + timeout - time.monotonic())
        return self._endpoint.transfers.fetch(transfers, own, most, left)

    # ---- a round ----

    def average(
        self,
        values: Floats | Choose,
        weight: float = 1.0,
        timeout: float = 60.0,
        reference: Floats | None = None,
    ) -> RoundReport:
        """Replaces ``values`` by their mean over a group of peers, in place.

        A value of which nothing comes stays as it was. So do all of them if the group fails; only
        what keeps this peer from taking part at all is an error.

        ``values``: shape (n,), n the same on all peers; or chosen when the round's number is known.
        ``weight``: what this peer's values count, 0 to 1e6. ``reference``: where the round before
        ended, with ``max_norm``; None: at 0. OperationTimeout: no group forms within ``timeout``
        seconds. RendezvousError: the directory refuses this peer.
        """
        with self._rounds:
            with self._lock:
                former, self._endpoints = self._endpoints[:-1], self._endpoints[-1:]
            for endpoint in former:
                endpoint.close()
            try:
                if self._file is not None:
                    self._file.waits(self.client.peers)
                begin = time.monotonic()
                self._endpoint.paths.close_over()
                try:
                    group = self.client.next_group(weight, timeout)
                except OperationTimeout as error:
                    raise self._why_none(error, timeout) from None
                waited = time.monotonic() - begin
                left = max(LEAST_SECONDS, timeout - waited)
                self.means.part = 0
                if callable(values):
                    self.means.part, values = values(group.round)
                if reference is None and self._max_norm:
                    reference = np.zeros_like(values)
                return self.show(self._average(values, group, waited, left, reference))
            finally:
                self.client.round_over()

    def show(self, report: RoundReport) -> RoundReport:
        """Has `lossycoll status` show what a round did; returns it."""
        if self._file is not None:
            self._file.averaged(self.client.peers, self.number, asdict(report))
        return report

    def _why_none(self, error: OperationTimeout, timeout: float) -> OperationTimeout:
        """Why no round has begun. The directory may well have answered."""
        try:
            others = self.client.names(ASK_SECONDS)
        except LossyError:
            return error
        return OperationTimeout(
            f"peer {self.number}: no round began within {timeout:g} s: peers that it waits for "
            f"weren't ready (they evaluate, or are suspended), or none that is ready has a weight; "
            f"{len(others)} are there: {', '.join(others)}"
        )

    def _average(
        self,
        values: Floats,
        group: Group,
        waited: float,
        timeout: float,
        reference: Floats | None,
    ) -> RoundReport:
        paths = self._endpoint.paths  # it may have got another number meanwhile
        formed = time.monotonic()
        numbers = tuple(member.number for member in group.members)
        contributions, kept, failure = 1.0, 1.0, ""
        self._unreachable = ()
        refused: tuple[int, ...] = ()
        if group.newer:
            contributions, failure = 0.0, f"another peer's state is newer: {group.newer} samples"
        elif not any(member.weight for member in group.members):
            contributions, failure = 0.0, "no peer of the round has a weight above 0"
        elif len(numbers) > 1 and len(values):
            try:
                one = self._exchange(paths, group, values, timeout, reference)
                contributions, kept = one.contributions or 1.0, one.kept
                refused = tuple(numbers[other] for other in sorted(one.refused))
            except LossyError as error:
                failure = str(error)
        missing = tuple(
            one.number
            for one in group.members
            if paths.has_gone(one.incarnation) or one in self._unreachable
        )
        return RoundReport(
            round=group.round,
            members=numbers,
            missing=missing,
            contributions=contributions,
            kept=kept,
            waited=waited,
            seconds=time.monotonic() - formed,
            failure=failure,
            absent=tuple((name, WHY_ABSENT[why]) for name, why in group.absent),
            samples=group.samples,
            newer=group.newer,
            refused=refused,
        )

    def _exchange(
        self,
        paths: Paths,
        group: Group,
        values: Floats,
        timeout: float,
        reference: Floats | None,
    ) -> Round:
        members = group.members
        rank = paths.rank_in(members)
        one: Round
        means = self._means_of(members)
        if reference is None:
            one = MeanRound(means, members, rank, values)
        else:
            how = reference, self._max_norm, means.per_packet
            one = BoundedRound(members, rank, values, *how)
        engine, self._unreachable = paths.begin_round(group.number, members)
        places = [place_text(member.host, member.port) for member in members]
        where = Where(rank, len(members), addresses=places)

        def run(plan: Plan, source: Floats, target: Floats) -> tuple[int, float]:
            call = self._call(plan, one.parts, timeout, means)
            ticket = engine.submit(call, source.ctypes.data, target.ctypes.data)
            return ticket, outcome(engine, ticket, where).contributions_mean

        try:
            one.exchange(engine, run, values)
        finally:
            paths.end_round(one.buffer)
        return one

    def _means_of(self, members: Sequence[Member]) -> MeanEncoding:
        """How a group's packets carry values. Within a machine few bits save nothing that is short,
        and take longer than the bytes that they spare."""
        if self.means.encoding == "same" or self._everywhere or not is_one_machine(members):
            return self.means
        if not self._has_told:
            self._has_told = True
            log.info(
                "peers of this machine average plain floats in place of %s, which take less time; "
                "the option link=udp, on all peers, has them as on a network",
                self.means.encoding,
            )
        return self._plain

    def _call(
        self, plan: Plan, parts: Sequence[float], timeout: float, means: MeanEncoding
    ) -> EngineCall:
        told = [int(np.float64(part).view(np.uint64)) for part in parts]
        return EngineCall.of(plan).given(
            dtype=DType.F32,
            signature=signature("swarm", self._offered.schema, plan.signature, means.numbers, told),
            timeout=timeout,
            delivery=lossy_delivery(self._delivery),
            lingers=True,
            weights=parts,
            divisor=0.0,
            encoding=means.encoding,
            keeps_sums=means.remembers,
        )


def is_one_machine(members: Sequence[Member]) -> bool:
    """True if members are known to reach one another within a machine. All members of a group see
    the same: who is where is what the directory has told them all."""
    return all(ip_address(one.host.partition("%")[0]).is_loopback for one in members)

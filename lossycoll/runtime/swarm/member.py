"""A peer: an engine whose processes come and go, and rounds of averaging in small groups.

Long because calls, rounds and what the client's thread says meet in one object; the work is done by
the modules around it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lossycoll.errors import (
    ClosedError,
    EngineError,
    LossyError,
    OperationTimeout,
    OptionError,
    RendezvousError,
)
from lossycoll.options.fields import Options
from lossycoll.plan import Plan, signature
from lossycoll.runtime.engine.asides import Place
from lossycoll.runtime.engine.binding import DType, Encoded, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.payload import payload_bytes
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.net.interfaces import choose

from .bounded import BoundedRound
from .client import DirectoryClient
from .ends import End
from .knock import key_of
from .knocker import KEEP_SECONDS, Knocker, KnockerCounts
from .lending import Lending
from .loans import Taken
from .means import Means, Round
from .paths import Floats, Paths, outcome
from .protocol import (
    PLACES,
    WHY_ABSENT,
    Averages,
    Group,
    Here,
    Joined,
    Loan,
    Member,
    Offers,
    Serves,
    Spare,
)
from .state import Snapshot
from .ways import TransportWay, Way

MTU: Final = 1500
"""Of all swarms: peers may be anywhere."""
ASK_SECONDS: Final = 2.0
"""For the directory to say who is there, when no round has begun."""
NO_ROUND: Final = -1
LEAST_SECONDS: Final = 1.0
"""For the values of a group, however long it took to form."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round did.

    Attributes:
        round: Its number; -1: none began.
        members: Numbers of the peers that began it together, this one's among them, in order of the
            parts of the values that they owned.
        missing: Those of them that were lost meanwhile, or to whom there is no route.
        contributions: Of how many peers a value is the mean, on average; 0: nobody had a weight.
        kept: The share of values that stayed as they were, since no mean of them came, or one that
            can't be.
        waited: Seconds until the group had formed.
        seconds: And from then on.
        failure: Why nothing was averaged; "": something was.
        absent: Peers that were there for this round and not in it: the name of each, and why.
        left_out: Why this peer's values didn't count, whatever its weight; "": they did.
        samples: What the swarm had had when the round began, by peers' reports.
        refused: Numbers of the members of whose values some weren't believed, with ``max_norm``.
        newer: Samples of another peer's state, which this one is to take before it averages again;
            0: none.
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


class SwarmMember:
    """A peer of a swarm, from when it has joined until ``close``.

    Args:
        directories: (host, port) of each that may be asked.
        name: This peer's; no two that live have the same.
        secret: The swarm's; None: all is in clear.
        options: Those of the engine.
        timeout: Seconds to join in.
        own_directory: The directory listens on all of this machine's addresses, for others too.
        keep: Seconds between two signs of life to the directory's UDP port and to each peer.
        rate: Bytes/s of this peer's link; 0: unknown.
        way: To directories, where none says how packets are seen; None: by the control transport.

    Raises:
        RendezvousError: No directory answers, or it refuses this peer.
        EngineError: The socket can't be opened.
    """

    def __init__(
        self,
        directories: Sequence[Place],
        *,
        name: str,
        secret: Secret | None = None,
        options: Options | None = None,
        timeout: float = 30.0,
        own_directory: bool = False,
        keep: float = KEEP_SECONDS,
        rate: int = 0,
        way: Way | None = None,
    ) -> None:
        self._options = self._delivery = options or Options(link="udp")
        self._secret = secret
        self._rate = rate
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """No two ends are opened at once, nor one for a number that is another's by then."""
        self._rounds = threading.Lock()
        """One round at a time."""
        self._group: tuple[EngineGroup, list[str]] | None = None
        """Of the round that is on, and the comings of its members."""
        self._unmet: frozenset[str] = frozenset()
        """Comings of those that are in the round, and out of reach."""
        self._schema = ""
        self._max_norm = 0.0
        self._said: Averages | None = None
        """What it averages, as the directory has agreed to."""
        self._offer = Offers(0)
        calls = self._lost, self._lend, self._came, self._met
        self._client = DirectoryClient(directories, name, way or TransportWay(secret), *calls)
        self._keep = keep
        self._is_observed = way is None
        self._end: End | None = None
        """By the number that it has now; None: it isn't open yet, or not any more."""
        self._former: list[End] = []
        """By numbers that it had before: others may still ask for packets."""
        try:
            joined = self._client.connect(timeout)
            self.session = joined.session
            # The directory of this very peer says nothing of the way to others.
            towards = None if own_directory else directories[0][0]
            self.address = choose(self._options.interface, towards).address
            self._payload = payload_bytes(MTU, 6 if ":" in self.address else 4)
            self._means = Means(self._options.encoding, self._payload)
            with self._opening:
                self.number = (self._client.joined or joined).number
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """An engine, and what goes by its socket, for this peer's number."""
        number = self.number
        host = Host(
            number, PLACES, self.address, payload_bytes=self._payload, options=self._options
        )
        try:
            if self._secret is not None:
                host.seal(b"", self._secret.filter(self.session))
            asides = host.asides()
            place = (self.address, host.link().port)
            host.start(
                int(self.session, 16), [place if one == number else None for one in range(PLACES)]
            )
        except BaseException:
            host.close()
            raise
        knocker = Knocker(
            asides,
            number,
            key_of(self._secret, self.session),
            lambda: self._client.directories[0] if self._is_observed else None,
            lambda seen, moved: self._is_seen(place, seen, moved),
            self._keep,
        )
        paths = Paths(
            host, number, self.session, self._secret, self._options, knocker, self._client.unmet
        )
        lending = Lending(number, paths, self._payload)
        with self._lock:
            if self._end is not None:
                former = self._end.lending
                lending.schema, lending.state = former.schema, former.state
            self._end = End(place, knocker, paths, lending)
        self._is_seen(place, knocker.seen() or place, False)

    def _is_seen(self, place: Place, seen: Place, moved: bool) -> None:
        """By the knockers' threads, too: where the world sees packets of the engine at ``place``
        come from."""
        with self._lock:
            if self._end is None or self._end.place != place:
                return  # one that this peer had by another number
            self._client.say(Here(*place, () if seen == place else (seen,)))
        if moved:  # and so are the routes that others know
            self._client.renew()

    def _came(self, joined: Joined) -> None:
        """By the client's thread: a directory has taken this peer in."""
        with self._opening:
            end = self._end
            if end is None:  # it is about to be opened, or closed
                return
            if joined.number != self.number:
                self._renumber(end, joined.number)
            else:  # maybe this one sees the socket otherwise than the one before
                end.knocker.ask()

    def _renumber(self, end: End, number: int) -> None:
        """Packets of the number that this peer had would be taken for those of another. A round or
        a loan that is on ends as it was."""
        with self._lock:
            self._former.append(end)
        self.number = number
        try:
            self._open()
        except EngineError:  # of the ports that there may be, the former has the last
            self._close_former()
            self._open()

    def _close_former(self) -> None:
        with self._lock:
            former, self._former = self._former, []
        for end in former:
            end.close()

    def close(self) -> None:
        """Leaves the swarm; a round that is on ends. Idempotent."""
        if self._group is None and self._end is not None:
            # Before others hear that this peer has gone: then they wait for no packet of it.
            self._end.paths.flush()
        self._client.close()
        with self._lock:
            engine = self._group[0] if self._group else None
            ends = [*self._former, *([self._end] if self._end is not None else [])]
        if engine is not None:
            engine.close()
        for end in ends:
            end.knocker.close()
            end.lending.close()
        with self._rounds:  # until whoever averages is out
            self._end, self._former = None, []
        for end in ends:
            end.paths.close()

    @property
    def directories(self) -> tuple[Place, ...]:
        """Whom this peer turns to in turn."""
        return self._client.directories

    @property
    def knocks(self) -> KnockerCounts:
        """What came by the engine's socket, is no packet, and changed nothing."""
        return KnockerCounts() if self._end is None else self._end.knocker.counts

    @property
    def malformed(self) -> int:
        """How often a directory has said what is no message."""
        return self._client.malformed

    def names(self, timeout: float = 10.0) -> tuple[str, ...]:
        """Of all peers, asked now.

        Raises:
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        return self._client.names(timeout)

    def serves(self, host: str, port: int) -> None:
        """This peer has a directory, for the time after the present one."""
        self._client.say(Serves(host, port))
        self._client.may_open((host, port), lambda: None)

    def may_serve(self, host: str, port: int, opens: Callable[[], None]) -> None:
        """This peer opens a directory if all others have gone.

        Args:
            host: Where: a numeric address.
            port: And at which port.
            opens: Does it, called by a thread of this peer, maybe more than once. May raise
                RendezvousError.
        """

        def serves() -> None:
            opens()
            self._client.say(Serves(host, port))

        self._client.may_open((host, port), serves)
        self._client.say(Spare(host, port))

    @property
    def heard(self) -> tuple[tuple[str, int], ...]:
        """Where directories are, or were, as this peer has heard."""
        return self._client.heard

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

        Args:
            schema: 16 to 64 hex digits, equal on all peers that average the same, and by the same
                means.
            grid: As in ``32x32``; "": it follows the number of peers.
            timeout: Seconds.
            max_missing: The option of this name, unless the options have it, ``repair`` or ``fec``.
            wire: The option of this name, unless the options have it.
            settings: What the schema is a digest of, to name values that differ.
            draft: :meth:`settle` says the rest before the first round.
            max_norm: As of :class:`.bounded.BoundedRound`; 0: all is believed.

        Raises:
            OptionError: ``max_norm`` with packets of few bits.
            RendezvousError: Others average something else, or by another wire; the grid is too
                small.
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
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
        self._agree(
            Averages(schema, grid, options.encoding, self._rate, settings, int(draft)), timeout
        )
        self._means = Means(options.encoding, self._payload)
        given = any(options.is_given(name) for name in ("max_missing", "repair", "fec"))
        self._delivery = options
        if max_missing is not None and not given:
            self._delivery = replace(options, max_missing=max_missing)

    def settle(self, schema: str, settings: str, target: int = 0, timeout: float = 10.0) -> None:
        """Says all of what this peer averages, after a draft.

        Args:
            schema: As of :meth:`averages`.
            settings: As of :meth:`averages`.
            target: Samples of all peers after which a round begins; 0: whenever peers are ready.
            timeout: Seconds.

        Raises:
            RendezvousError: Others average something else.
            OperationTimeout: The directory doesn't answer within ``timeout`` seconds.
        """
        said = self._said
        if said is None:
            raise RendezvousError(f"peer {self.number} hasn't said what it averages")
        wanted = replace(said, schema=schema, settings=settings, draft=0, peers=0, target=target)
        if wanted != said:
            self._agree(wanted, timeout)

    def _agree(self, wanted: Averages, timeout: float) -> None:
        self._client.averages(wanted, timeout)
        self._said, self._schema = wanted, wanted.schema
        with self._lock:
            if self._end is not None:
                self._end.lending.schema = wanted.schema

    @property
    def has_said(self) -> bool:
        """Whether it has said what it averages, or a draft of it."""
        return self._said is not None

    def wait_for(self, peers: int, timeout: float) -> None:
        """Returns when so many peers average the same, this one included.

        Raises:
            RendezvousError: There are fewer after ``timeout`` seconds, or this one hasn't said what
                it averages.
            OperationTimeout: The directory doesn't answer.
        """
        if self._said is None:
            raise RendezvousError(f"peer {self.number} hasn't said what it averages")
        try:
            self._client.averages(replace(self._said, peers=peers), timeout)
        except OperationTimeout:
            found = self.names(ASK_SECONDS)
            raise RendezvousError(
                f"peer {self.number}: after {timeout:g} s fewer than {peers} peers average the "
                f"same; {len(found)} are there: {', '.join(found)}"
            ) from None

    # ---- states ----

    def offers(self, state: Callable[[], Snapshot] | None) -> None:
        """Lends its state to newcomers from now on.

        Args:
            state: What to lend: called by a thread of this peer, whenever somebody asks. None:
                nothing any more.
        """
        with self._lock:
            if self._end is None:
                return
            lending = self._end.lending
            had, lending.state = lending.state, state
        if had is not None or state is not None:
            self._say_offer(replace(self._offer, has=int(state is not None)))

    def progress(self, samples: int, since: int, *, claims: bool = False) -> None:
        """Says how far this peer is.

        Args:
            samples: Of the swarm, as of this peer's latest round or the state that it has taken.
            since: Its own since then.
            claims: Its state comes from a checkpoint: if it is the newest, others are to take it.
        """
        self._say_offer(Offers(self._offer.has, samples, since, int(claims)))

    @property
    def is_due(self) -> bool:
        """Whether a round is due by the samples of all peers."""
        return self._client.due

    @property
    def peers(self) -> int:
        """How many peers there are, as the directory has said last."""
        return self._client.peers

    def _say_offer(self, offer: Offers) -> None:
        self._offer = offer
        self._client.say(offer)

    def borrow(
        self, own: Snapshot | None, lenders: int, most: int, timeout: float = 10.0
    ) -> Taken | None:
        """Takes the state of others.

        Args:
            own: What this peer has already; None: nothing.
            lenders: Of so many at most.
            most: Bytes that it may have.
            timeout: Seconds for all of it.

        Returns:
            The state; None: nobody has one, or none that is newer than ``own``.

        Raises:
            OperationTimeout: The directory doesn't answer, or the state doesn't come in time.
            LossyError: No lender has all of the state, or none is there any more.
        """
        begin = time.monotonic()
        loans = self._client.loans(lenders, timeout)
        end = self._end
        if end is None:
            raise ClosedError(f"peer {self.number} has left the swarm")
        left = max(LEAST_SECONDS, begin + timeout - time.monotonic())
        return end.lending.borrow(loans, own, most, left) if loans else None

    def _lend(self, loan: Loan) -> None:
        """By the client's thread."""
        if self._end is not None:
            self._end.lending.lend(loan)

    # ---- a round ----

    def average(
        self,
        values: Floats,
        weight: float = 1.0,
        timeout: float = 60.0,
        reference: Floats | None = None,
    ) -> RoundReport:
        """Replaces ``values`` by their mean over a group of peers, in place.

        A value of which nothing comes stays as it was. So do all of them if the group fails; only
        what keeps this peer from taking part at all is an error.

        Args:
            values: Shape (n,), n the same on all peers.
            weight: What this peer's values count, 0 to 1e6.
            timeout: Seconds for the whole of it.
            reference: Where the round before ended, with ``max_norm``; None: at 0.

        Raises:
            OperationTimeout: No group forms within ``timeout``.
            RendezvousError: The directory refuses this peer.
        """
        with self._rounds:
            self._close_former()
            try:
                group, waited = self._group_of(weight, timeout)
                left = max(LEAST_SECONDS, timeout - waited)
                if reference is None and self._max_norm:
                    reference = np.zeros_like(values)
                return self._average(values, group, waited, left, reference)
            finally:
                self._client.round_over()

    def _group_of(self, weight: float, timeout: float) -> tuple[Group, float]:
        """The next round's group, and the seconds until it had formed."""
        begin = time.monotonic()
        if self._end is not None:
            self._end.paths.close_over()
        try:
            group = self._client.next_group(weight, timeout)
        except OperationTimeout as error:
            raise self._why_none(error, timeout) from None
        return group, time.monotonic() - begin

    def _why_none(self, error: OperationTimeout, timeout: float) -> OperationTimeout:
        """Why no round has begun. The directory may well have answered."""
        try:
            others = self.names(ASK_SECONDS)
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
        end = self._end  # it may have got another number meanwhile
        if end is None:
            raise ClosedError(f"peer {self.number} has left the swarm")
        paths = end.paths
        formed = time.monotonic()
        numbers = tuple(member.number for member in group.members)
        contributions, kept, failure = 1.0, 1.0, ""
        self._unmet = frozenset()
        refused: tuple[int, ...] = ()
        if group.newer:
            contributions, failure = 0.0, f"another peer's state is newer: {group.newer} samples"
        elif not any(member.weight for member in group.members):
            contributions, failure = 0.0, "no peer of the round has a weight above 0"
        elif len(numbers) > 1 and len(values):
            try:
                found = self._exchange(paths, group, values, timeout, reference)
                contributions, kept, refused = found
            except LossyError as error:
                failure = str(error)
        missing = tuple(
            one.number
            for one in group.members
            if paths.has_gone(one.coming) or one.coming in self._unmet
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
    ) -> tuple[float, float, tuple[int, ...]]:
        """Returns contributions per value, the share of values that stayed, and numbers of members
        that weren't believed."""
        members, world = group.members, len(group.members)
        numbers = [member.number for member in members]
        if paths.number not in numbers:
            raise EngineError(f"peer {paths.number}: not in the group that it was told of")
        rank = numbers.index(paths.number)
        paths.forget_gone()
        one: Round | BoundedRound
        if reference is None:
            one = Round(self._means, members, rank, values)
        else:
            how = reference, self._max_norm, self._means.per_packet
            one = BoundedRound(members, rank, values, *how)
        engine = self._engine_of(paths, group.number, members, rank)
        places = [f"{member.host}:{member.port}" for member in members]
        where = Where(rank, world, addresses=places)

        def run(plan: Plan, source: Floats, target: Floats) -> tuple[int, float]:
            call = self._call(plan, one.parts, source, target, timeout)
            ticket = engine.submit(Encoded.of(plan), call)
            return ticket, outcome(engine, ticket, where).contributions_mean

        refused: tuple[int, ...] = ()
        try:
            if isinstance(one, BoundedRound):
                ticket, _ = run(one.collect, one.values, one.gathered)
                contributions = one.combine(engine, ticket)
                ticket, _ = run(one.spread, one.means, one.means)
                kept = one.take(engine, ticket, values)
                refused = tuple(numbers[other] for other in sorted(one.refused))
            else:
                ticket, contributions = run(one.plan, one.buffer, one.buffer)
                kept = one.take(engine, ticket, values)
        finally:
            with self._lock:
                self._group = None
            paths.keep(engine, one.buffer, members)
        return contributions or 1.0, kept, refused

    def _call(
        self, plan: Plan, parts: Sequence[float], source: Floats, target: Floats, timeout: float
    ) -> EngineCall:
        options, means = self._delivery, self._means
        told = [int(np.float64(part).view(np.uint64)) for part in parts]
        code, most_parity, missing = options.parity
        return EngineCall(
            input=source.ctypes.data,
            output=target.ctypes.data,
            dtype=DType.F32,
            scale=1.0,
            signature=signature("swarm", self._schema, plan.signature, means.numbers, told),
            timeout=timeout,
            reliable=False,
            repair=0 if options.chooses_rounds else options.repair,
            notify=False,
            code=code,
            most_parity=most_parity,
            choose_rounds=options.chooses_rounds,
            max_missing=missing,
            lingers=True,
            weights=parts,
            divisor=0.0,
            encoding=means.encoding,
            keeps_sums=means.remembers,
        )

    def _engine_of(
        self, paths: Paths, number: int, members: Sequence[Member], rank: int
    ) -> EngineGroup:
        others = [member for other, member in enumerate(members) if other != rank]
        unmet = paths.admit_all(others, members[rank].coming)
        self._unmet = frozenset(member.coming for member in unmet)
        engine = paths.group(number, members)
        comings = [member.coming for member in members]
        with self._lock:
            self._group = engine, comings
        for peer, coming in enumerate(comings):
            if paths.has_gone(coming) or coming in self._unmet:
                engine.peer_dead(peer)
        return engine

    def _met(self, comings: Sequence[str]) -> None:
        """By the client's thread."""
        if self._end is not None:
            self._end.paths.met(comings)

    def _lost(self, coming: str) -> None:
        """By the client's thread."""
        with self._lock:
            ends = [*self._former, *([self._end] if self._end is not None else [])]
        for end in ends:
            end.paths.gone(coming)
        with self._lock:  # a group that is made meanwhile looks who has gone
            engine, comings = self._group or (None, [])
        if engine is not None and coming in comings:
            with contextlib.suppress(ClosedError):  # the round has just ended
                engine.peer_dead(comings.index(coming))

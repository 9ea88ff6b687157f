"""A group at one rank: all its parts, made in order and undone in order.

A group whose members are connected is made without the store, a message, or a word of the others.
Each rank derives the same numbers by itself, from the group that all members are of (the parent)
and the name that torch gives the new one. Options and members are compared by the first operation.
docs/rendezvous.md has the reasons.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import InterfaceError, LossyError, OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.collectives.point_to_point import Messages
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.core.call import bounded
from lossycoll.runtime.core.exits import close_at_exit
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.host import HOST_OPTIONS, Host
from lossycoll.runtime.keys.aead import check_library
from lossycoll.runtime.keys.secret import Secret, find_secret
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import View
from lossycoll.runtime.world.queries import answers
from lossycoll.runtime.world.rendezvous import Rendezvous

from .builder import WORLDS, GroupBuilder, GroupSpec, Parent, World, written_in
from .devices import check_device
from .group_steps import (
    enter,
    explain_long_calls,
    fault_group,
    join,
    meet,
    member_of,
    open_engine,
    read_options,
    refused,
    tell_ready,
)


class Group:
    """``endpoint``, ``topology`` and a ``store`` without stale keys, for one rank of one group.

    Raises the errors of :mod:`lossycoll.errors`, on every rank that can know. ``failure``: nobody
    meets, and every call raises this.
    """

    def __init__(self, spec: GroupSpec, failure: LossyError | None = None) -> None:
        spec = replace(spec, timeout=bounded(spec.timeout))
        self._host: Host | None = None
        self.as_parent: Parent | None = None
        """Parent for groups of some of this one's ranks; None in a world of one."""
        self.abort_hooks: Mapping[int, Callable[[], object]] = {}
        """Functions that are called when the group fails; they may change."""
        try:
            if failure is not None or spec.size == 1:
                self._stay_alone(spec)
                self.endpoint.health.failure = failure
            else:
                with contextlib.ExitStack() as undo:
                    self._meet(spec, undo)
                    undo.pop_all()
        except (OptionError, InterfaceError) as error:
            # Options and interfaces don't know whose they are, or only the rank in the job.
            reason = error.reason if isinstance(error, OptionError) else error
            raise type(error)(f"rank {spec.rank}/{spec.size}: {reason}") from error
        close_at_exit(self.close)

    def _stay_alone(self, spec: GroupSpec) -> None:
        """No connections: a world of one, or nobody has met."""
        find_secret()
        check_device(spec.store, spec.rank, spec.size)
        options = read_options(spec, ())
        self.messages: Messages | None = None
        self.store: Store = PrefixStore(f"lossy/{secrets.token_hex(8)}", spec.store)
        self.topology = Topology.flat(spec.size)
        self.endpoint = self._make_endpoint(spec, options, ["this process"] * spec.size)

    def _meet(self, spec: GroupSpec, undo: contextlib.ExitStack) -> None:
        secret, unusable = usable_secret(spec.pg_options)

        def alive(hello: Mapping[str, Any]) -> bool:
            """Whether the rank 0 that once said this still listens."""
            if "control" not in hello:
                return False
            host, port = hello["control"]
            return answers(host, port, 0, hello["token"], spec.size, secret=secret)

        rendezvous = Rendezvous(
            PrefixStore("lossy", spec.store),
            spec.rank,
            spec.size,
            spec.timeout.total_seconds(),
            describe=f"{socket.gethostname()} pid {os.getpid()}",
            alive=alive,
            secret=secret,
        )
        try:
            builder = GroupBuilder(spec, rendezvous, undo, secret, unusable)
            parent = spec.parent
            if parent is not None and parent.world.hold():
                try:
                    if connected(builder, parent):
                        self._assemble(builder)
                        return
                finally:
                    parent.world.release()
            check_device(spec.store, spec.rank, spec.size)
            with WORLDS.holding(spec.global_ranks) as worlds:
                # Never in clear where there is a secret by now, nor on some ranks alone.
                sealed = secret is not None
                builder.worlds = [one for one in worlds if one.host.is_sealed == sealed]
                meet(builder)
                self._assemble(builder)
        except LossyError as error:
            rendezvous.part(error)
            raise
        except Exception as error:
            failure = refused(spec.rank, spec.size, error)
            rendezvous.part(failure)
            raise failure from error

    def _assemble(self, builder: GroupBuilder) -> None:
        """Makes the parts; their order is the protocol, since all ranks exchange the same keys."""
        spec = builder.spec
        # It tells the others if this rank fails from now on: they have met it, so nothing in the
        # store would keep them from waiting.
        builder.membership = member_of(
            *(builder.undo, builder.plane, builder.session, builder.members),
            outlive=builder.options.continues,
            definition=builder.definition,
        )
        open_engine(builder)
        self._host, self.topology = builder.host, builder.topology
        self.store = PrefixStore(f"lossy/s/{builder.session}", spec.store)
        join(builder)
        self.endpoint = self._make_endpoint(
            *(spec, builder.options, builder.addresses, builder.network.interface.name),
            (builder.number, builder.engine, builder.membership),
        )
        health = self.endpoint.health
        self.messages = Messages(
            builder.engine, health, builder.options, self.endpoint.operations.group_failure
        )
        explain_long_calls(builder, health)
        enter(builder, self.endpoint)
        world = builder.founded or builder.world
        assert world is not None
        numbers = dict(zip(spec.global_ranks, builder.members, strict=True))
        self.as_parent = Parent(world, numbers, builder.session)
        tell_ready(health, builder)

    def _make_endpoint(
        self,
        spec: GroupSpec,
        options: Options,
        addresses: Sequence[str],
        device: str = "",
        connection: tuple[int, EngineGroup | None, Membership | None] = (0, None, None),
    ) -> Endpoint:
        health = Health(
            spec.rank,
            spec.size,
            addresses=addresses,
            liveness=options.liveness,
            control=connection[2],
            on_failure=self._end,
            outlive=options.continues,
            group=spec.name,
            device=device,
        )
        context = GroupContext(health, options, *connection, self.topology)
        return Endpoint(context, timeout=spec.timeout.total_seconds())

    @property
    def socket(self) -> object:
        """The object that groups which send by one socket share; None in a world of one."""
        return self._host

    def rekey(self) -> None:
        """New keys for all that the processes of this one's world send from now on."""
        if self.as_parent is not None:
            self.as_parent.world.plane.rekey()

    def _end(self, error: LossyError) -> None:
        """The group has failed: nothing may wait any longer."""
        for hook in list(self.abort_hooks.values()):
            try:
                hook()
            except Exception as raised:  # it is somebody else's
                logfmt.log.warning(
                    "%s: an abort hook raised %r", self.endpoint.health.where, raised
                )
        self.endpoint.operations.abort(error)

    def close(self) -> None:
        """Leaves the group: says goodbye, joins all threads, frees all sockets. Idempotent."""
        if self.messages is not None:
            self.messages.flush()
        self.endpoint.close()
        if self.messages is not None:
            self.messages.close()
        if self._host is not None:
            self._host.release()
            self._host = None
        atexit.unregister(self.close)  # last: what Ctrl-C keeps this from is done at exit


def usable_secret(pg_options: object) -> tuple[Secret | None, OptionError | None]:
    """The job's secret, or why what is set can't be used: the other ranks are to hear of that."""
    try:
        options = Options.resolve(pg_options)
    except OptionError:  # which is told under the secret
        options = Options()
    try:
        found = find_secret()
        if found is not None:
            check_library(options.libcrypto, options.cipher)
    except OptionError as error:
        return None, error
    return found, None


# ---- connected members ----


def connected(builder: GroupBuilder, parent: Parent) -> bool:
    """Fills in what a meeting would tell, without one, if the parent's world lasts.

    False: they meet in the store, as all of them ask for a host of their own; whether a rank does,
    the others hear from it. Raises a LossyError where this rank or another one can't take part;
    whoever doesn't know yet is told.
    """
    spec, undo, world = builder.spec, builder.undo, parent.world
    members = tuple(parent.numbers[rank] for rank in spec.global_ranks)
    session = parent.next_session(spec.name)
    try:
        if builder.unusable is not None:
            raise builder.unusable
        options = read_options(spec, [world])
        asked = _own_host(options, spec.pg_options, world)
        if builder.secret is not None and not (world.host.is_sealed or asked):
            raise OptionError(
                f"rank {spec.rank}/{spec.size}: a secret is set now, and was not when the group "
                f"was made whose part this is: set it before init_process_group"
            )
    except Exception:
        member_of(undo, world.plane, session, members)  # it tells the others
        raise
    if asked:
        # A rank that doesn't ask wouldn't come to the store; it ends the group when it hears of it.
        with contextlib.ExitStack() as stack:
            membership = member_of(stack, world.plane, session, members)
            listener = _Askers(spec, world, members)
            membership.open(listener)
            membership.own_host(asked)
            listener.wait(spec.timeout.total_seconds())
        return False
    builder.session, builder.options, builder.network = session, options, world.network
    builder.definition, builder.number = spec.defined(options), fault_group(spec.name)
    builder.world, builder.plane, builder.members = world, world.plane, members
    builder.shares = True
    return True


def _own_host(options: Options, pg_options: object, world: World) -> dict[str, Any]:
    """The options by which a group asks for a host of its own; empty: the world's will do.

    What is written for this group counts also where it is the world's already: on other ranks,
    whose environments differ, it may not be.
    """
    written = written_in(pg_options)
    return {
        name: getattr(options, name)
        for name, of_world in zip(HOST_OPTIONS, world.host.options, strict=True)
        if name in written or getattr(options, name) != of_world
    }


class _Askers(Health):
    """Health of a group without calls, whose ranks ask for a host of their own."""

    def __init__(self, spec: GroupSpec, world: World, members: tuple[int, ...]) -> None:
        self._changed = threading.Event()
        self._missing = set(range(spec.size)) - {spec.rank}
        super().__init__(
            spec.rank,
            spec.size,
            addresses=[world.host.addresses[member] for member in members],
            liveness=world.plane.liveness,
            control=None,
            on_failure=lambda _: self._changed.set(),
        )

    def on_round(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:  # type: ignore[override]
        self.on_dead(rank, silent, ended)
        return 0

    def on_views(self, views: Sequence[View], agreed: bool) -> None:
        pass

    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None:
        del options
        self._missing.discard(rank)
        if not self._missing:
            self._changed.set()

    def wait(self, seconds: float) -> None:
        """Returns when all have asked."""
        if not self._changed.wait(seconds):
            raise RendezvousError(
                f"{self.where}: ranks {sorted(self._missing)} have not come after "
                f"{seconds:g} s; do all ranks make this group?",
                peer=min(self._missing),
            )
        if self.failure is not None:
            raise self.failure

"""A group at one rank: all its parts, made in order and undone in order.

Rendezvous, interface, engine and control plane come together here; process_group.py
turns torch's calls into theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import InterfaceError, LossyError, OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.parts import Parts
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.core.call import bounded
from lossycoll.runtime.core.exits import close_at_exit
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret, find_secret
from lossycoll.runtime.membership.control_plane import ControlPlane
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.membership.membership import Membership
from lossycoll.runtime.membership.probe import answers
from lossycoll.runtime.membership.rendezvous import Rendezvous
from lossycoll.runtime.p2p.messages import Messages

from .cohorts import COHORTS, Parent
from .connected import connected
from .devices import check_device
from .group_steps import (
    become_member,
    check_links,
    enter,
    join,
    meet,
    open_engine,
    tell_ready,
)
from .making import Making, Met, Place
from .resource_limits import refused
from .sealing import usable_secret
from .status import watch


class Group:
    """``endpoint``, ``topology`` and a ``store`` without stale keys, for one rank of one group.

    Raises the errors of :mod:`lossycoll.errors`, on every rank that can know.
    """

    def __init__(self, place: Place, pg_options: object) -> None:
        place = replace(place, timeout=bounded(place.timeout))
        self._host: Host | None = None
        self._plane: ControlPlane | None = None
        self.as_parent: Parent | None = None
        """What groups of some of this one's ranks are made by; None in a world of one."""
        try:
            if place.size == 1:
                self._stay_alone(place, pg_options)
            else:
                with contextlib.ExitStack() as undo:
                    self._meet(place, pg_options, undo)
                    undo.pop_all()
        except (OptionError, InterfaceError) as error:
            # Options and interfaces don't know whose they are, or only the rank in the job.
            reason = error.reason if isinstance(error, OptionError) else error
            raise type(error)(f"rank {place.rank}/{place.size}: {reason}") from error
        close_at_exit(self.close)

    def _stay_alone(self, place: Place, pg_options: object) -> None:
        """A world of one: nothing to send."""
        find_secret()
        check_device(place.store, place.rank, 1)
        options = Options.resolve(pg_options)
        check_links(options, 1)
        logfmt.show(options)
        self.messages: Messages | None = None
        self.store: Store = PrefixStore(f"lossy/{secrets.token_hex(8)}", place.store)
        self.topology = Topology.flat(1)
        self.endpoint = self._make_endpoint(place, options, ["this process"])

    def _meet(self, place: Place, pg_options: object, undo: contextlib.ExitStack) -> None:
        secret, unusable = usable_secret(pg_options)
        rendezvous = Rendezvous(
            PrefixStore("lossy", place.store),
            place.rank,
            place.size,
            place.timeout.total_seconds(),
            describe=f"{socket.gethostname()} pid {os.getpid()}",
            alive=lambda hello: _alive(hello, place.size, secret),
            secret=secret,
        )
        try:
            with connected(place, pg_options, undo, secret is not None, unusable) as met:
                if met is not None:
                    self._assemble(place, Making(place, rendezvous, undo, (), secret), met)
                    return
            check_device(place.store, place.rank, place.size)
            with COHORTS.holding(place.global_ranks) as cohorts:
                # Never in clear where there is a secret by now, nor on some ranks alone.
                alike = [one for one in cohorts if one.host.is_sealed == (secret is not None)]
                making = Making(place, rendezvous, undo, alike, secret, unusable)
                self._assemble(place, making, meet(making, pg_options))
        except LossyError as error:
            rendezvous.part(error)
            raise
        except Exception as error:
            failure = refused(place.rank, place.size, error)
            rendezvous.part(failure)
            raise failure from error

    def _assemble(self, place: Place, making: Making, met: Met) -> None:
        """The order is the protocol: where ranks meet in the store, all exchange the same keys one
        after the other."""
        membership = become_member(making, met)
        data = open_engine(making, met)
        self._host, self._plane = data.host, met.plane
        self.topology = data.topology
        self.store = PrefixStore(f"lossy/s/{met.session}", place.store)
        joined = join(making, met, data.host, membership)
        self.endpoint = self._make_endpoint(
            place,
            met.options,
            data.addresses,
            number=met.number,
            engine=data.engine,
            control=membership,
        )
        self.messages = Messages(
            data.engine,
            self.endpoint.health,
            met.options,
            self.endpoint.operations.group_failure,
        )
        watch(making, met, self.endpoint.health, data.host, data.engine.number)
        enter(making, met, joined, self.endpoint)
        cohort = joined.founded or met.cohort
        assert cohort is not None
        numbers = dict(zip(place.global_ranks, met.members, strict=True))
        self.as_parent = Parent(cohort, numbers)
        tell_ready(self.endpoint.health, met, data, place.global_ranks)

    def _make_endpoint(
        self,
        place: Place,
        options: Options,
        addresses: Sequence[str],
        *,
        number: int = 0,
        engine: EngineGroup | None = None,
        control: Membership | None = None,
    ) -> Endpoint:
        health = Health(
            place.rank,
            place.size,
            addresses=addresses,
            liveness=options.liveness,
            control=control,
            on_failure=self._end,
            outlive=options.continues,
            group=place.name,
        )
        parts = Parts(health, options, number, engine, control, self.topology)
        return Endpoint(parts, timeout=place.timeout.total_seconds())

    @property
    def socket(self) -> object:
        """What groups that send by one socket have in common; None in a world of one."""
        return self._host

    def rekey(self) -> None:
        """New keys for all that the processes of this one's cohort send from now on."""
        if self._plane is not None:
            self._plane.renew_keys()

    def _end(self, error: LossyError) -> None:
        """The group has failed: nothing may wait any longer."""
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


def _alive(hello: Mapping[str, Any], world: int, secret: Secret | None) -> bool:
    """Whether the rank 0 that once said ``hello`` still listens."""
    if "control" not in hello:
        return False
    host, port = hello["control"]
    return answers(host, port, 0, hello["token"], world, secret=secret)

"""A group at one rank: all its parts, made in order and undone in order.

Rendezvous, interface, engine, gloo mesh and control plane come together here; process_group.py
turns torch's calls into theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import InterfaceError, LossyError, OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import faults
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.core.call import bounded
from lossycoll.runtime.engine.binding import Engine
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.membership.failure_detector import Control
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.membership.hub_sockets import reachable
from lossycoll.runtime.membership.rendezvous import Rendezvous, compare_options
from lossycoll.runtime.net.buffers import fitting_payload, packets_per_peer, receive_buffer
from lossycoll.runtime.net.interfaces import Interface, choose
from lossycoll.runtime.net.payload import AUTO_MTU_MAX, payload_bytes
from lossycoll.runtime.p2p.endpoint import Messages

from .gloo_mesh import GlooMesh
from .resource_limits import check_descriptors, refused

log: Final = logging.getLogger("lossycoll")


@dataclass(frozen=True)
class Place:
    """Where this process stands: a rank of a group. ``name`` is torch's name of the group."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    name: str


class Group:
    """``communicator``, ``gloo`` and a ``store`` without stale keys, for one rank of one group.

    Raises the errors of :mod:`lossycoll.errors`, on every rank that can know.
    """

    def __init__(self, place: Place, pg_options: object) -> None:
        place = replace(place, timeout=bounded(place.timeout))
        self._host: Host | None = None
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
        # Threads that still run when the interpreter ends would bring it down.
        atexit.register(self.close)

    def _stay_alone(self, place: Place, pg_options: object) -> None:
        """A world of one: nothing to send. Parts of torch ask for a gloo group all the same."""
        options = Options.resolve(pg_options)
        _check_links(options, 1)
        logfmt.show(options)
        self.messages: Messages | None = None
        self.store: Store = PrefixStore(f"lossy/{secrets.token_hex(8)}", place.store)
        store = PrefixStore("gloo", self.store)
        self._mesh = GlooMesh(store, 0, 1, timeout=place.timeout, address="127.0.0.1")
        self.communicator = self._communicator(place, options, ["this process"])

    def _meet(self, place: Place, pg_options: object, undo: contextlib.ExitStack) -> None:
        rendezvous = Rendezvous(
            PrefixStore("lossy", place.store),
            place.rank,
            place.size,
            place.timeout.total_seconds(),
            describe=f"{socket.gethostname()} pid {os.getpid()}",
            alive=_alive,
        )
        try:
            self._assemble(place, pg_options, rendezvous, undo)
        except LossyError as error:
            rendezvous.part(error)
            raise
        except Exception as error:
            failure = refused(place.rank, place.size, error)
            rendezvous.part(failure)
            raise failure from error

    def _assemble(
        self,
        place: Place,
        pg_options: object,
        rendezvous: Rendezvous,
        undo: contextlib.ExitStack,
    ) -> None:
        """Makes the group's parts, which ``undo`` closes if a later one can't be made.

        Long because the order is the protocol: all ranks exchange the same keys one after the
        other, and each part is made of what the exchanges before it have brought.
        """
        rank, size = place.rank, place.size
        # What can be wrong with this rank alone is found first, so that the others hear of it.
        hello: dict[str, Any] = {}
        failure: LossyError | None = None
        try:
            options = Options.resolve(pg_options)
            _check_links(options, size)
            logfmt.show(options)
            check_descriptors(rank, size)
            interface = choose(options.interface, _master(place.store))
            hello = {"address": interface.address, "options": options.shared()}
            control = Control(rank, size, options.liveness, outlive=options.continues)
            undo.callback(control.close)
            port = control.open(interface.address, options.ports)
            hello["control"] = [interface.address, port]
            if rank == 0:
                hello["token"] = secrets.token_hex(16)
                hello["group"] = _number(place.name)
        except LossyError as error:
            failure = error
        except Exception as error:
            failure = refused(rank, size, error)
        ranks = rendezvous.meet(hello, failure)
        compare_options(rank, [entry["options"] for entry in ranks])
        first = ranks[0]
        interface = _same_network(interface, options, [entry["address"] for entry in ranks])
        mtu = options.mtu or min(interface.mtu, AUTO_MTU_MAX)
        if mtu > interface.mtu:
            log.warning(
                "rank %d/%d: option mtu is %d, but that of %s is %d: larger packets are "
                "refused; lower LOSSYCOLL_MTU, or raise that of the interface",
                rank,
                size,
                mtu,
                interface,
                interface.mtu,
            )
        payload = min(rendezvous.exchange("payload", _payload(place, options, interface, mtu)))
        host = Host(rank, size, interface.address, payload_bytes=payload, options=options)
        undo.callback(host.close)
        info = host.link()
        links = rendezvous.exchange("links", [interface.address, info.port])
        peers = [(str(name), int(port)) for name, port in links]
        host.start(int(rendezvous.session, 16), peers)
        engine = Engine(
            host, rank, size, number=1, faults=first["group"], options=options, met=True
        )
        undo.callback(engine.close)
        self._host = host

        self.store = PrefixStore(f"lossy/s/{rendezvous.session}", place.store)
        # Before the control plane, whose connections would be taken for gloo's.
        store = PrefixStore("gloo", self.store)
        address = interface.address
        self.messages = messages = Messages(
            rank, size, token=first["token"], address=address, ports=options.ports
        )
        undo.callback(messages.close)
        ends = rendezvous.exchange("messages", [address, messages.port])
        self._mesh = GlooMesh(store, rank, size, timeout=place.timeout, address=address)
        undo.callback(self._mesh.group.shutdown)
        addresses = [f"{host}:{port}" for host, port in peers]
        self.communicator = self._communicator(
            place,
            options,
            addresses,
            number=first["group"],
            engine=engine,
            control=control,
        )
        endpoints = [(str(host), int(port)) for host, port in (r["control"] for r in ranks)]
        messages.start(self.communicator.health, options.liveness, ends)
        self.communicator.on_lost = messages.peer_lost
        control.start(_Listener(self.communicator), first["token"], endpoints)
        if not control.meet(place.timeout.total_seconds()):
            raise self.communicator.health.failure or RendezvousError(
                f"rank {rank}/{size}: no control connection with ranks {control.missing()} after "
                f"{place.timeout.total_seconds():g} s; can all reach TCP port "
                f"{first['control'][1]} of {first['control'][0]}?"
            )
        logfmt.event(
            logging.INFO,
            self.communicator.health.where,
            "ready",
            address=addresses[rank],
            dev=interface.name,
            mtu=mtu,
            payload=payload,
            fast=",".join(info.active) or "none",
            buffers=info.receive_buffer,
            **({"inject": options.inject} if options.inject else {}),
        )

    def _communicator(
        self,
        place: Place,
        options: Options,
        addresses: Sequence[str],
        *,
        number: int = 0,
        engine: Engine | None = None,
        control: Control | None = None,
    ) -> Endpoint:
        health = Health(
            place.rank,
            place.size,
            addresses=addresses,
            liveness=options.liveness,
            control=control,
            on_failure=self._end,
            outlive=options.continues,
        )
        return Endpoint(
            health,
            options=options,
            group=number,
            timeout=place.timeout.total_seconds(),
            engine=engine,
            control=control,
        )

    def _end(self, error: LossyError) -> None:
        """The group has failed: nothing may wait any longer, on the engine or on gloo."""
        self.communicator.end_pending(error)
        self._mesh.cut()
        if self.messages is not None:
            self.messages.fail(error)

    @property
    def gloo(self) -> Any:
        return self._mesh.group

    def close(self) -> None:
        """Leaves the group: says goodbye, joins all threads, frees all sockets. Idempotent."""
        if self.messages is not None:
            self.messages.flush()
        self.communicator.close()
        if self.messages is not None:
            self.messages.close()
        self._mesh.group.shutdown()
        if self._host is not None:
            self._host.close()
        atexit.unregister(self.close)  # last: what Ctrl-C keeps this from is done at exit


class _Listener:
    """What the control plane talks to: the health, and the communicator's figures."""

    def __init__(self, communicator: Endpoint) -> None:
        health = communicator.health
        self._communicator = communicator
        self.on_dead = health.on_dead
        self.on_abort = health.on_abort
        self.on_broken = health.on_broken
        self.on_bye = health.on_bye
        self.on_mismatch = health.on_mismatch
        self.call_at = health.call_at
        self.figures = communicator.figures
        self.on_views = communicator.go_on
        self.on_apart = health.on_apart

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        self._communicator.health.on_lost(rank, silent, ended)
        return self._communicator.lose(rank)


def _check_links(options: Options, size: int) -> None:
    """Raises OptionError when injection is told of a rank that the group doesn't have."""
    try:
        faults.parse(options.inject).check_world(size)
    except ValueError as error:
        raise OptionError(
            f"option inject is {options.inject!r}, but {error}; a group of other ranks than the "
            f"job's takes its own from pg_options"
        ) from None


def _payload(place: Place, options: Options, interface: Interface, mtu: int) -> int:
    """Data bytes per packet that suit this rank: its MTU and its receive buffer."""
    largest = payload_bytes(mtu, interface.version)
    buffer = receive_buffer(options.socket_buffer, interface.version)
    payload = fitting_payload(largest, buffer, place.size)
    if packets_per_peer(payload, buffer, place.size) < 1:
        log.warning(
            "rank %d/%d: the receive buffer of %d bytes can't hold one packet of each of the %d "
            "other ranks, so some will be lost; raise sysctl net.core.rmem_max, and "
            "LOSSYCOLL_SOCKET_BUFFER if that is set",
            place.rank,
            place.size,
            buffer,
            place.size - 1,
        )
    return payload


def _alive(hello: Mapping[str, Any]) -> bool:
    """Whether the rank 0 that once said ``hello`` still listens."""
    return "control" in hello and reachable(*hello["control"])


def _master(store: Store) -> str | None:
    """Host of the store's server, or MASTER_ADDR; None if there is none (a file, say)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else os.environ.get("MASTER_ADDR")


def _number(name: str) -> int:
    """A 32-bit number for a group's name; the same in every run, since it keys injected faults."""
    return int(name) if name.isdecimal() and len(name) < 9 else zlib.crc32(name.encode())


def _same_network(interface: Interface, options: Options, addresses: list[str]) -> Interface:
    """The master's own host may know the master as loopback, where no other host can reach it.

    Then this rank takes the address that routes to a peer's.
    """
    elsewhere = [a for a in addresses if not Interface("", a, 0).loopback]
    if interface.loopback and elsewhere and options.interface == "auto":
        return choose("auto", elsewhere[0])
    return interface

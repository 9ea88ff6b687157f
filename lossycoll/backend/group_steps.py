"""The steps by which a group is made: each fills in what it has made in the group's builder.

A step that needs the other ranks goes through the rendezvous, in the same order on all of them.
What a step has opened is closed by ``GroupBuilder.undo`` if a later one fails.

Long because the steps are in one file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import EngineError, LossyError, OperationTimeout, OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology, faults
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.plan_cache import name_of
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host, host_options, version, wire_version
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.net.interfaces import Interface, candidates, choose
from lossycoll.runtime.net.machine import core_limit
from lossycoll.runtime.world import metrics
from lossycoll.runtime.world.comparison import (
    common_version,
    compare_machines,
    compare_options,
    compare_versions,
)
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.group_state import Health, kind_of_unmade
from lossycoll.runtime.world.hang_log import HangLog
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import Defined
from lossycoll.runtime.world.queries import ask_rank

from .builder import (
    WORLDS,
    Contact,
    Ends,
    GroupBuilder,
    GroupSpec,
    World,
    attachment,
    with_liveness_of,
)
from .meeting import GroupListener, Meeting
from .rdma import agree, open_rdma
from .sharing import (
    LEARNT,
    compare_sites,
    is_crowded,
    learn_sites,
    open_sharing,
    share,
    topology_of,
)
from .work import reason_of

_warned: Final[list[Where]] = []
"""The first group that sends in clear, once it was warned of."""
DESCRIPTORS: Final = (32, 4)
"""Descriptors that a group may take, with room to spare: in any case, and for each rank."""


def prepare(builder: GroupBuilder) -> None:
    """Opens what this rank needs before the ranks meet, who hear of its errors."""
    spec = builder.spec
    if builder.unusable is not None:
        raise builder.unusable
    builder.options = options = read_options(spec, builder.worlds)
    wanted = host_options(options)
    shared = [world.network for world in builder.worlds if world.host.options == wanted]
    if shared:  # nothing has to be opened, so nothing is looked for
        builder.network, builder.interfaces = shared[0], [shared[0].interface]
        return
    check_descriptors(spec.rank, spec.size)
    found = candidates(options.interface, _master(spec.store))
    builder.interfaces = found
    builder.network = attachment(builder.here, options, found[0])
    if not builder.worlds:
        builder.rdma = open_rdma(options, found[0])
        builder.undo.callback(builder.rdma.close)
        builder.ends = _open_ends(builder, builder.network.payload)


def check_descriptors(rank: int, size: int) -> None:
    """Looks whether this process can open what a group takes: some libraries end the process that
    is refused a descriptor."""
    wanted = DESCRIPTORS[0] + DESCRIPTORS[1] * size
    opened: list[int] = []
    try:
        while len(opened) < wanted:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise EngineError(
            f"rank {rank}/{size}: a group of {size} ranks may take {wanted} descriptors, but this "
            f"process can have only {len(opened)} more ({error.strerror}); raise ulimit -n, now "
            f"{limit}, or destroy groups that are not needed",
            errno=error.errno or 0,
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def refused(rank: int, size: int, cause: Exception) -> EngineError:
    """An error for all ranks, of what the system refused while a group was made."""
    code = getattr(cause, "errno", None)
    error = EngineError(
        f"rank {rank}/{size}: this process was refused what a group needs: {reason_of(cause)}; is "
        f"it short of descriptors, threads or memory (ulimit -a)?",
        errno=code if isinstance(code, int) else 0,
    )
    error.__cause__ = cause
    return error


def read_options(spec: GroupSpec, worlds: Sequence[World]) -> Options:
    """The options of a group whose ranks may meet in one of ``worlds``."""
    options = with_liveness_of(Options.resolve(spec.pg_options), spec.pg_options, worlds)
    check_links(options, spec.size)
    logfmt.show(options)
    return options


def _open_ends(builder: GroupBuilder, payload: int) -> Ends:
    """Opens a host, and a plane where there is no world yet."""
    spec, options, interface = builder.spec, builder.options, builder.network.interface
    address = interface.address
    if builder.world is not None:
        plane, control = builder.plane, builder.plane.place_of(builder.members[spec.rank])
    else:
        plane = ControlPlane(spec.rank, spec.size, options.liveness, secret=builder.secret)
        builder.undo.callback(plane.close)
        control = address, plane.open(address, options.ports)
    host = Host(spec.rank, spec.size, address, payload_bytes=payload, options=options)
    builder.undo.callback(host.close)
    sharing = open_sharing(options, spec.size)
    builder.undo.callback(sharing.close)
    link = address, host.link().port
    return Ends(plane, host, sharing, Contact(control, link, interface.name, sharing.offer))


def meet(builder: GroupBuilder) -> None:
    """All ranks tell one another what they are and have, or why they can't take part."""
    spec, rendezvous, here = builder.spec, builder.rendezvous, builder.here
    hello: dict[str, Any] = {}
    failure: LossyError | None = None
    try:
        prepare(builder)
        hello = _hello(builder)
    except LossyError as error:
        failure = error
    except Exception as error:
        failure = refused(spec.rank, spec.size, error)
    ranks = rendezvous.meet(hello, failure)
    compare_versions(spec.rank, [entry.get("version") for entry in ranks])
    compare_options(spec.rank, [entry["options"] for entry in ranks])
    compare_sites(here, [entry["site"] for entry in ranks])
    _use_the_network_of(builder, ranks)
    builder.session = rendezvous.session
    builder.definition = spec.defined(builder.options)
    builder.number, builder.token = ranks[0]["group"], ranks[0]["token"]
    world, builder.members = _common_world(builder.worlds, [entry["roots"] for entry in ranks])
    builder.world = world
    if world is not None:
        builder.plane, builder.ends = world.plane, None
        builder.shares = all(world.session in entry["hosts"] for entry in ranks)
        return
    builder.reach = agree(here, rendezvous, builder.rdma, ranks)
    _open_all(builder, ranks)
    assert builder.ends is not None
    builder.plane = builder.ends.plane
    machines = [
        (m.boot, m.network) if (m := one.offer.machine) else None for one in builder.contacts
    ]
    compare_machines(
        builder.who,
        [one.control[0] for one in builder.contacts],
        machines,
        [one.device for one in builder.contacts],
    )


def _open_all(builder: GroupBuilder, ranks: Sequence[Mapping[str, Any]] = ()) -> None:
    """Opens the sockets of a new host here, and learns where those of all ranks are. ``ranks``:
    what these have said of sockets that were open before they met, as is usual in a new world."""
    rendezvous, ends, agreed = builder.rendezvous, builder.ends, builder.reach.payload
    payloads = {entry["payload"] for entry in ranks} | ({agreed} if agreed is not None else set())
    found = [Interface("", entry["address"], 0) for entry in ranks]
    families = {(one.loopback, one.version) for one in found}
    alike = len(payloads) == len(families) == 1
    if ends is None or not alike or not all("link" in entry for entry in ranks):
        # Some had another world to offer, have taken another address by now, or can't send so much.
        payload = agreed or min(rendezvous.exchange("payload", builder.network.payload))
        if ends is not None and not (
            ends.contact.control[0] == builder.network.interface.address
            and ends.host.link().payload_bytes == payload
        ):
            ends.close()
            ends = None
        builder.ends = ends = ends or _open_ends(builder, payload)
        ranks = rendezvous.exchange("ends", ends.to_json())
    builder.contacts = [Contact.from_json(one) for one in ranks]


def _hello(builder: GroupBuilder) -> dict[str, Any]:
    """Facts of this rank that the others have to know."""
    wanted = host_options(builder.options)
    hello: dict[str, Any] = {
        "address": builder.network.interface.address,
        "addresses": [one.address for one in builder.interfaces],
        "options": builder.options.shared(),
        "version": [version(), wire_version()],
        "roots": {world.session: world.rank for world in builder.worlds},
        "hosts": [one.session for one in builder.worlds if one.host.options == wanted],
        "payload": builder.network.payload,
        "site": builder.options.site,
    }
    if builder.ends is not None:
        hello |= builder.ends.to_json()
    hello["rdma"] = builder.rdma.to_json()
    if builder.spec.rank == 0:
        hello |= {"token": secrets.token_hex(16), "group": fault_group(builder.spec.name)}
    return hello


def _common_world(
    worlds: Sequence[World], offers: Sequence[Mapping[str, int]]
) -> tuple[World | None, tuple[int, ...]]:
    """The first world that every rank offers, and their ranks in it; else None, for a new one."""
    mine = {world.session: world for world in worlds}
    for session in offers[0]:
        members = tuple(offer.get(session, -1) for offer in offers)
        if session in mine and -1 not in members and len(set(members)) == len(members):
            return mine[session], members
    return None, tuple(range(len(offers)))


def open_engine(builder: GroupBuilder) -> None:
    """Opens the group's engine: on the world's host, where all can; else on a host of its own."""
    spec = builder.spec
    if builder.shares:
        assert builder.world is not None
        builder.host = builder.world.host
        held = builder.host.hold()  # the builder holds it as well, so it can't be closed by now
        assert held
        builder.undo.callback(builder.host.release)
    else:
        if builder.ends is None:  # the world's host isn't what the group asks for
            _open_all(builder)
        _start(builder)
    members = builder.members if builder.shares else tuple(range(spec.size))
    builder.engine = EngineGroup(
        builder.host,
        spec.rank,
        spec.size,
        # Of its own rendezvous, so no other group's; not 0.
        number=int(builder.session, 16) % (2**32 - 1) + 1,
        fault_group=builder.number,
        options=builder.options,
        members=members,
        # Others may be a step behind, and then have no group for what comes early. All of a new
        # world have it when their planes have met.
        met=builder.world is None,
        definition=builder.definition.digest,
        name=spec.name,
    )
    builder.undo.callback(builder.engine.close)
    builder.addresses = [builder.host.addresses[member] for member in members]
    builder.topology = topology_of(builder.here, builder.host, members, builder.options)


def _start(builder: GroupBuilder) -> None:
    """Starts a host, once it is known who shares its memory, and who its site."""
    assert builder.ends is not None
    here, contacts, sharing = builder.here, builder.contacts, builder.ends.sharing
    host = builder.host = builder.ends.host
    offers = [one.offer for one in contacts]
    with contextlib.closing(sharing):
        topology, near = share(here, builder.rendezvous, host, sharing, offers, builder.token)
        found = builder.reach.addresses
        reached = {rank: one for rank, one in found.items() if rank not in near}
        builder.rdma.hand_over(host, is_used=bool(reached))
        if builder.options.site == LEARNT:
            listeners = [one.control for one in contacts]
            topology = learn_sites(here, builder.rendezvous, topology, listeners)
        crowded = is_crowded(here.rank, offers, core_limit())
        if builder.secret is not None:
            meeting = builder.rendezvous.transcript
            keys = builder.secret.path_secrets(meeting, here.rank, here.world)
            host.seal(keys, builder.secret.filter(meeting))
            builder.plane.sealed.add(host)
        show_status(builder)
        host.start(
            int(builder.session, 16),
            [one.link for one in contacts],
            topology,
            near,
            verbs=reached,
            crowded=crowded,
        )


def member_of(
    undo: contextlib.ExitStack,
    plane: ControlPlane,
    session: str,
    members: Sequence[int],
    *,
    outlive: bool = False,
    definition: Defined | None = None,
) -> Membership:
    """This rank's place in the group ``session``. If ``undo`` runs by an error, all hear of it."""
    membership = Membership(
        plane, int(session, 16), members, outlive=outlive, definition=definition
    )
    undo.callback(membership.close)

    def tell(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            membership.abort(str(error) or type(error).__name__, kind_of_unmade(error))

    undo.push(tell)
    return membership


def join(builder: GroupBuilder) -> None:
    """Starts a new world's plane, now that this rank has the group's engine."""
    if builder.world is not None:
        return
    plane, host, spec = builder.plane, builder.host, builder.spec
    plane.protocol.pulse = host.pulse
    plane.start(builder.token, [one.control for one in builder.contacts])
    answer_status(builder)
    builder.founded = World(
        builder.session, spec.rank, spec.global_ranks, plane, host, builder.network
    )


def enter(builder: GroupBuilder, endpoint: Endpoint) -> None:
    """From now on the group hears of what happens. All ranks of a new world have met then.

    Raises the group's failure where a rank died meanwhile, RendezvousError where the ranks can't
    reach one another.
    """
    world, health = builder.founded, endpoint.health
    if world is not None:
        listener = GroupListener(endpoint, lambda: world.plane.has_met)
        builder.membership.open(listener)
        Meeting(builder, health, listener.lost_early).wait()
        WORLDS.add(world)
        return
    # No member is known to be lost or gone, this rank included?
    all_here = builder.plane.is_sound and all(map(builder.plane.is_here, builder.members))
    builder.membership.open(GroupListener(endpoint), wait=not all_here)
    failure = health.failure
    # A timeout is of a call: who has made the group before may have failed it by now. The group is
    # made all the same, as by gloo, and this rank's first call raises it.
    if failure is not None and not isinstance(failure, OperationTimeout):
        raise failure


def tell_ready(health: Health, builder: GroupBuilder) -> None:
    """Logs what the group was made with; as debug where another has the same socket."""
    options, network, host = builder.options, builder.network, builder.host
    ranks, link = builder.spec.global_ranks, host.link()
    logfmt.event(
        logging.DEBUG if builder.shares else logging.INFO,
        health.where,
        "ready",
        **({"ranks": ",".join(map(str, ranks))} if builder.shares else {}),
        address=builder.addresses[health.where.rank],
        dev=network.interface.name,
        mtu=network.mtu,
        payload=link.payload_bytes,
        fast=",".join(link.active) or "none",
        buffers=link.receive_buffer,
        **({"sealed": options.cipher} if host.is_sealed else {}),
        control="{}:{}".format(*builder.plane.place_of(builder.members[builder.spec.rank])),
        **_who_is_near(builder.topology, health.where.rank, options),
        **({"inject": options.inject} if options.inject else {}),
    )
    if not host.is_sealed:
        warn_of_clear(health.where, builder.addresses)


def _who_is_near(topology: Topology, rank: int, options: Options) -> dict[str, Any]:
    """Fields of ``ready``, where hosts or sites are shared."""
    fields: dict[str, Any] = {}
    if not topology.is_flat:
        fields["algorithm"] = name_of(options, topology)
    if topology.shares_hosts:
        here = topology.members_of_hosts[topology.hosts[rank]]
        fields |= {"hosts": topology.n_hosts, "local": ",".join(map(str, here))}
    return fields | ({"sites": topology.n_sites} if topology.n_sites > 1 else {})


def show_status(builder: GroupBuilder) -> None:
    """Has the host's status page written, before it starts. Without one the job runs as well."""
    spec, host, options = builder.spec, builder.host, builder.options
    if options.status == "off":
        return
    address, port = builder.contacts[spec.rank].control
    job = status_page.Job(
        session=int(builder.session, 16),
        ranks=spec.global_ranks,
        liveness=options.liveness,
        control=f"{address}:{port}",
        sealed=host.is_sealed,
    )
    try:
        host.show(job)
    except OSError as error:
        log.warning("%s: `lossycoll status` can't show this rank: %s", builder.who, error)


def answer_status(builder: GroupBuilder) -> None:
    """Has a started plane answer those that ask, and note on the host's page whom it hears."""
    plane, host, options = builder.plane, builder.host, builder.options
    plane.protocol.note = host.note_peer
    session = int(builder.session, 16)
    shown = options.status == "on"

    def read(calls: bool = False) -> list[Record]:
        return status_page.pages(session, calls=calls) if shown else []

    plane.tell_status(builder.session, read)
    if options.metrics:
        metrics.Exporter(
            options.metrics,
            host.process,
            sealed=host.is_sealed,
            read=read,
            is_over=lambda: not host.is_open,
        ).start()


def explain_long_calls(builder: GroupBuilder, health: Health) -> None:
    """Has calls that take long explained in the log."""
    page, world = builder.host.page, builder.world
    if page is None:
        return
    session = int(builder.session if world is None or not builder.shares else world.session, 16)
    # What asks later keeps these, and not the builder.
    plane, secret, members = builder.plane, builder.secret, builder.members
    as_in_world = builder.shares or world is None

    def ask(process: int) -> tuple[Record | None, str | None]:
        """Asks a process, numbered as in the world on a host that groups share."""
        rank = process if as_in_world else members[process]
        return ask_rank(plane.place_of(rank), secret)

    health.on_long_wait = HangLog(
        health.where,
        page,
        builder.engine.number,
        builder.options.warn_after,
        lambda: status_page.pages(session),
        ask,
    ).look


def check_links(options: Options, size: int) -> None:
    """Raises OptionError when injection is told of a rank that the group doesn't have."""
    try:
        faults.parse(options.inject).check_world(size)
    except ValueError as error:
        raise OptionError(
            f"option inject is {options.inject!r}, but {error}; a group of other ranks than the "
            f"job's takes its own from pg_options"
        ) from None


def _master(store: Store) -> str | None:
    """Host of the store's server, or MASTER_ADDR; None if there is none (a file, say)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else os.environ.get("MASTER_ADDR")


def fault_group(name: str) -> int:
    """A 32-bit number for a group's name; the same in every run, since it keys injected faults."""
    return int(name) if name.isdecimal() and len(name) < 9 else zlib.crc32(name.encode())


def _use_the_network_of(builder: GroupBuilder, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Takes an address of the family that all have, and that the others can reach.

    The master's name may have addresses of both families, and a host only one of them. The master's
    own host may know the master as loopback, where no other host can reach it: then this rank takes
    the address that routes to a peer's.
    """
    offered = [entry.get("addresses") or [entry["address"]] for entry in ranks]
    version = common_version(builder.who, offered)
    alike = [
        one
        for one in (Interface("", address, 0) for addresses in offered for address in addresses)
        if one.version == version and not one.loopback
    ]
    interface = next((one for one in builder.interfaces if one.version == version), None)
    is_inner = interface is None or interface.loopback
    if is_inner and alike and builder.options.interface == "auto":
        interface = choose("auto", alike[0].address)
    if interface is not None and interface != builder.network.interface:
        builder.network = attachment(builder.here, builder.options, interface)


def warn_of_clear(where: Where, addresses: Sequence[str]) -> None:
    """Rank 0 warns of packets that leave its machine in clear, once in a process."""
    machines = {address.rpartition(":")[0] for address in addresses}
    if where.rank == 0 and len(machines) > 1 and not _warned:
        _warned.append(where)
        log.warning(
            "%s: nothing is sealed between %d addresses: whoever can send to them can change "
            "results; set LOSSYCOLL_SECRET on all ranks (`lossycoll keygen` makes one)",
            where,
            len(machines),
        )

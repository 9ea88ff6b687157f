"""Status of a job at one rank: its engine's status page, and answers at its control plane."""

from __future__ import annotations

from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.world import metrics
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.hang_log import HangLog
from lossycoll.runtime.world.queries import ask_rank

from .builder import GroupBuilder


def show(builder: GroupBuilder) -> None:
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


def tell(builder: GroupBuilder) -> None:
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


def watch(builder: GroupBuilder, health: Health) -> None:
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

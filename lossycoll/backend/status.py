"""Status of a job at one rank: its engine's status page, and answers at its control plane."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.world import metrics
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.hang_log import HangLog
from lossycoll.runtime.world.status_query import ask_rank

from .builder import GroupBuilder, GroupSpec, Met

log: Final = logging.getLogger("lossycoll")


def show(spec: GroupSpec, met: Met, host: Host, listeners: Sequence[tuple[str, int]]) -> None:
    """Has a host's status page written, before it starts. Without one the job runs as well."""
    if met.options.status == "off":
        return
    address, port = listeners[spec.rank]
    job = status_page.Job(
        session=int(met.session, 16),
        ranks=spec.global_ranks,
        liveness=met.options.liveness,
        control=f"{address}:{port}",
        sealed=host.is_sealed,
    )
    try:
        host.show(job)
    except OSError as error:
        where = Where(spec.rank, spec.size)
        log.warning("%s: `lossycoll status` can't show this rank: %s", where, error)


def tell(plane: ControlPlane, met: Met, host: Host) -> None:
    """Has a started plane answer those that ask, and note on the host's page whom it hears."""
    plane.protocol.note = host.note_peer
    session = int(met.session, 16)
    shown = met.options.status == "on"

    def read(calls: bool = False) -> list[Record]:
        return status_page.pages(session, calls=calls) if shown else []

    plane.tell_status(met.session, read)
    if met.options.metrics:
        metrics.tell(
            met.options.metrics,
            host.process,
            sealed=host.is_sealed,
            read=read,
            is_over=lambda: not host.is_open,
        )


def watch(builder: GroupBuilder, met: Met, health: Health, host: Host, number: int) -> None:
    """Has calls that take long explained in the log."""
    page = host.page
    if page is None:
        return
    session, plane, secret = int(met.session, 16), met.plane, builder.secret
    if met.world is not None and met.shares:
        session = int(met.world.session, 16)

    def ask(process: int) -> tuple[Record | None, str | None]:
        """Of a host that groups share, processes are numbered as in the world."""
        rank = process if met.shares or met.world is None else met.members[process]
        return ask_rank(plane.place_of(rank), secret)

    health.on_long_wait = HangLog(
        health.where, page, number, met.options.warn_after, lambda: status_page.pages(session), ask
    ).look

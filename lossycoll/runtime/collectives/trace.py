"""Log at level ``debug`` about one operation: its begin, its streams, its end."""

from __future__ import annotations

import contextlib
import logging

from lossycoll.errors import ClosedError
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.core.logfmt import event, log
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure, Where
from lossycoll.runtime.engine.reports import Report


def wanted() -> bool:
    """Whether anybody reads it."""
    return log.isEnabledFor(logging.DEBUG)


def begin(where: Where, operation: Operation, number: int, buffers: tuple[int, int]) -> None:
    """Logs that operation ``number`` was submitted."""
    event(
        logging.DEBUG,
        where,
        "begin",
        seq=operation.call.seq,
        op=number,
        call=operation.call,
        ranks=len(operation.members),
        in_place=buffers[0] == buffers[1],
    )


def end(
    where: Where, engine: EngineGroup, operation: Operation, report: Report, failure: Failure
) -> None:
    """Logs what became of it, and when its streams began and ended."""
    with contextlib.suppress(ClosedError):
        for stream in engine.streams(operation.ticket):
            event(logging.DEBUG, where, "stream", op=report.op, **stream.in_seconds())
    event(
        logging.DEBUG,
        where,
        "end",
        seq=operation.call.seq,
        op=report.op,
        call=operation.call,
        code=Code(failure.code).name,
        cause=report.cause.name,
        seconds=report.elapsed,
        sent=report.packets_sent,
        resent=report.packets_resent,
        received=report.packets_received,
        recovered=report.packets_recovered,
        missing=report.packets_missing,
        contributions=report.contributions_mean,
        own_filled=report.own_filled,
    )

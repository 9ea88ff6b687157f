"""How a call waits for the other ranks to come to the gloo mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lossycoll.errors import LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.membership.group_state import Health

from .gloo_mesh import GlooMesh


def met(health: Health, call: Collective, mesh: GlooMesh, timeout: timedelta) -> Any:
    """The mesh's ProcessGroupGloo, when all ranks have come to it.

    Args:
        health: The group's state.
        call: The call that needs the mesh, issued.
        mesh: The mesh.
        timeout: How long the other ranks have.

    Raises:
        LossyError: The group's failure; it fails when the time is over.
        RendezvousError: The mesh can't be connected, though all ranks are alive.
    """
    try:
        return mesh.group(_until(health, call, mesh, timeout))
    except RendezvousError as error:
        health.admit(call)
        # Of a rank that has died this one may learn by the connection first.
        failure = health.await_failure(health.liveness)
        raise (error if failure is None else failure.again(call.numbered)) from error


def _until(
    health: Health, call: Collective, mesh: GlooMesh, timeout: timedelta
) -> Callable[[], None]:
    """Looks after the group while it waits; also compares what the ranks are at."""
    begin = time.monotonic()
    long_wait = health.long_wait(call, begin)

    def still() -> None:
        now = time.monotonic()
        health.admit(call)
        if now - begin >= timeout.total_seconds():
            raise not_met(health, call, mesh.missing, timeout)
        long_wait.ask_if_due(now)

    return still


def not_met(
    health: Health, call: Collective, missing: Sequence[int], timeout: timedelta
) -> LossyError:
    """Fails the group since ``missing`` ranks didn't come within ``timeout``; returns its error."""
    who = ", ".join(health.where.peer(rank) for rank in missing) or "no rank"
    text = (
        f"{health.where}: {call.numbered}: {who} didn't take part within "
        f"{timeout.total_seconds():g} s; stuck, or still computing?"
    )
    error = OperationTimeout(text, peer=missing[0] if missing else None)
    health.fail(error, tell=True)
    return (health.failure or error).again(call.numbered)

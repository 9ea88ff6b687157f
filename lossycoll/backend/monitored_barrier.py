"""Gloo's monitored barrier, whose error names the ranks that are missing.

It isn't a row of the table of collectives, and doesn't go through ``Dispatcher.run``: there is no
work, the ranks' timeouts may differ, the engine has nothing to do it by, and the names of the
missing are in the words of gloo's error alone.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from lossycoll.errors import LossyError, OperationTimeout
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.membership.group_state import Health

from .description import CollectiveKind, Description, Loss
from .dispatch import Dispatcher
from .gloo_mesh import GlooMesh
from .mesh_wait import met, not_met
from .staging import two_buffers

KIND: Final = CollectiveKind("monitored_barrier", Loss.NEVER, two_buffers)


def monitored_barrier(
    dispatcher: Dispatcher, mesh: GlooMesh, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Waits for all ranks.

    Args:
        dispatcher: The group's pipeline, which names the call.
        mesh: The group's private gloo mesh.
        timeout: How long rank 0 waits for the others.
        wait_all_ranks: Whether rank 0 names all ranks that are missing, rather than the first.

    Raises:
        OperationTimeout: At rank 0, if ranks are missing.
        LossyError: The group has failed, or fails by this call.
    """
    call, health = dispatcher.named(Description(KIND, [], [])), dispatcher.health
    dispatcher.issue_by_gloo(call)
    if not timeout and health.where.rank == 0:
        # Gloo takes what is left of it, nothing, for no limit, unless a millisecond has passed.
        raise _no_time(dispatcher, call)
    gloo = met(health, call, mesh, timeout)
    try:
        gloo.monitored_barrier(timeout, wait_all_ranks)
    except RuntimeError as error:
        raise _explained(health, call, error) from error


def _no_time(dispatcher: Dispatcher, call: Collective) -> LossyError:
    """The error at rank 0 for a timeout of nothing, in gloo's words."""
    where = dispatcher.where
    text = (
        f"{where}: {call.numbered}: Rank 0 timed out in monitoredBarrier after 0 ms; "
        f"give it a longer timeout"
    )
    error = OperationTimeout(text, peer=where.rank)
    dispatcher.fail(call, error)
    return error


def _explained(health: Health, call: Collective, cause: RuntimeError) -> LossyError:
    """Gloo's error as the group's. Only rank 0 knows who was missing."""
    missing = re.search(r"Ranks? ([\d, ]+) failed to pass .* in (\d+) ms", str(cause))
    if missing and "Timed out" in str(cause):
        ranks = [int(rank) for rank in missing[1].split(",")]
        not_met(health, call, ranks, timedelta(milliseconds=int(missing[2])))
    error = health.verdict(call, cause).again(call.numbered)
    error.args = (f"{error} (gloo: {(str(cause).splitlines() or [''])[0]})",)
    return error

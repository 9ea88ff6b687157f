"""A process group for torchft's Manager, which makes another one at each change of its quorum."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import Store

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.errors import OptionError


def torchft_process_group(timeout: float = 60.0, options: Mapping[str, Any] | None = None) -> Any:
    """Process group for torchft's ``Manager(pg=...)``, with backend lossy.

    Args:
        timeout: Timeout in seconds, of the replicas' meeting and of the group's calls.
        options: Options of the groups, as ``pg_options``.

    Returns:
        A ``torchft.process_group.ProcessGroupWrapper``.

    Raises:
        OptionError: torchft isn't installed, or has no such class.
    """
    try:
        base: Any = import_module("torchft.process_group").ProcessGroupWrapper
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"torchft_process_group needs torchft 0.2 or later, but {error}; pip install torchft"
        ) from error

    class ProcessGroupLossy(base):  # type: ignore[misc]
        _pg: Any

        def getBackendName(self) -> str:
            return "torchft-lossy"

        def abort(self, errored: bool = True) -> None:
            group: LossyProcessGroup | None = self._pg
            if errored or group is None:
                super().abort(errored)
            else:  # another quorum: nothing has failed
                self._pg = None
                group.lossy_leave()

        def shutdown(self) -> None:
            group, self._pg = self._pg, None
            if group is not None:
                group.shutdown()

        def _create_pg(self, store: Store, rank: int, world_size: int) -> LossyProcessGroup:
            return LossyProcessGroup(
                SimpleNamespace(
                    store=store,
                    group_rank=rank,
                    group_size=world_size,
                    timeout=self._timeout,
                    group_id="torchft",
                    global_ranks_in_group=[],
                    parent=None,
                    configured="cpu:lossy,cuda:lossy",
                ),
                None if options is None else dict(options),
            )

    return ProcessGroupLossy(timeout=timedelta(seconds=timeout))

"""Groups whose members change, made without torch.distributed's own group: several in one process,
and on torch 2.13, which can't ask for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from lossycoll.backend.process_group import LossyProcessGroup

SECONDS = 30


def job_store() -> Any:
    """The test's, as each rank reaches it."""
    port = int(os.environ["MASTER_PORT"])
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


class Member:
    """One process among ``world`` that can be in one group.

    Args:
        store: The job's.
        rank: This process's, until the first group.
        world: How many there are.
        options: The groups'.
        configured: The backends of each device's tensors.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        options: Any = None,
        configured: str = "cpu:lossy",
    ) -> None:
        self.store, self.first_rank, self.world = store, rank, world
        self.group = LossyProcessGroup(
            SimpleNamespace(
                store=store,
                group_rank=rank,
                group_size=world,
                timeout=timedelta(seconds=SECONDS),
                group_id="0",
                global_ranks_in_group=[],
                enable_reconfigure=True,
                configured=configured,
            ),
            options,
        )

    def handles(self, key: str) -> list[str]:
        """Those of all processes, which all ask for."""
        self.store.set(f"{key}/{self.first_rank}", self.group.get_reconfigure_handle())
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        return [self.store.get(each).decode() for each in keys]

    def meet(self, uuid: int, handles: Sequence[str] | set[str], seconds: float = SECONDS) -> None:
        """Goes on with the processes of these handles."""
        timeout = timedelta(seconds=seconds)
        opts: Any = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)
        assert self.group.reconfigure(opts).wait()

    def total(self) -> float:
        """What each rank's number and one add up to, in the group as it is."""
        tensor = torch.full((4,), self.group.rank() + 1.0)
        self.group.allreduce([tensor]).wait()
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    def await_all(self, key: str) -> None:
        """Returns when all processes are here, in a group or in none."""
        self.store.set(f"{key}/{self.first_rank}", "1")
        self.store.wait([f"{key}/{rank}" for rank in range(self.world)])

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size."""
        return self.group.rank(), self.group.size()

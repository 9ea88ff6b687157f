"""torchft over lossycoll: a group for each quorum, and the example whose replicas are killed."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import lossycoll
from tests.support.harness import Ranks
from tests.support.members import job_store

QUORUMS = 3


def stand_in() -> None:
    """As much of torchft's module as a group of its Manager's needs, without torchft."""

    class ProcessGroupWrapper:
        def __init__(self, timeout: timedelta) -> None:
            self._timeout, self._pg = timeout, None

        def abort(self, errored: bool = True) -> None:
            del errored
            group, self._pg = self._pg, None
            if group is not None:
                group.abort()

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            raise NotImplementedError

        def configure(self, store: Any, rank: int, world_size: int) -> None:
            self.abort(errored=False)
            self._pg = self._create_pg(store, rank, world_size)

    module: Any = ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = ProcessGroupWrapper
    sys.modules |= {"torchft": ModuleType("torchft"), "torchft.process_group": module}


def rank_quorums(rank: int, world: int) -> Any:
    stand_in()
    wrapper, store = lossycoll.torchft_process_group(30, {"delivery": "reliable"}), job_store()
    assert wrapper.getBackendName() == "torchft-lossy"
    found = []
    for quorum in range(QUORUMS):
        size = world - (quorum == 1)
        if rank < size:
            wrapper.configure(PrefixStore(f"quorum/{quorum}", store), rank, size)
            tensor = torch.ones(4)
            wrapper._pg.allreduce([tensor], dist.AllreduceOptions()).wait()
            found.append(float(tensor[0]))
    wrapper.shutdown()
    assert wrapper._pg is None
    return found


def test_each_quorum_has_a_group() -> None:
    """And none of them fails: each change of the quorum would be logged as a failure."""
    with Ranks(rank_quorums, 3) as ranks:
        outcomes = ranks.collect(60)
    assert [each.value for each in outcomes] == [[3.0, 2.0, 3.0], [3.0, 2.0, 3.0], [3.0, 3.0]]
    for each in outcomes:
        assert "event=ready" in each.stderr
        assert "event=failed" not in each.stderr


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    with pytest.raises(lossycoll.OptionError, match="pip install torchft"):
        lossycoll.torchft_process_group()

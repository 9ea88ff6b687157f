"""Why Python calls don't go by ``c10d.Backend``: torch hands callers a stand-in for the work.

``wait`` of the stand-in raises the work's error; all else that a work tells is lost. A test that
fails here says that torch has mended something. When all of it is mended, Python's calls may go by
DeviceBackend alone (docs/backend.md, "What torch sees").
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import lossycoll
from lossycoll.backend.devices import HAS_BACKENDS

pytestmark = [
    pytest.mark.skipif(not HAS_BACKENDS, reason="before torch 2.14 Python can't make a backend"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
MENDED = "torch has mended it: see this file's first lines"
_c10d: Any = c10d
ERROR = lossycoll.PeerLostError("rank 0/2: lost rank 1", peer=1)


class FailedWork(dist.Work):
    """All that lossy's works tell, of one that has failed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self.waited: timedelta | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waited = timeout
        raise ERROR

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def exception(self) -> Any:
        return ERROR

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return 1

    _source_rank = source_rank


def backend(made: list[FailedWork]) -> Any:
    """A backend whose calls fail; ``made`` gets its works."""

    class Failing(_c10d.Backend):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(0, 2)

        def getBackendName(self) -> str:
            return "failing"

        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
            made.append(FailedWork(tensors))
            return made[-1]

        def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
            made.append(FailedWork(tensors))
            return made[-1]

        recvAnysource = recv_anysource

    return Failing()


def group_of(backend: Any, size: int) -> Any:
    """torch's own group, which calls a backend."""
    group = _c10d.ProcessGroup(_c10d.HashStore(), 0, size)
    custom = _c10d.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    group._register_backend(torch.device("cpu"), custom, backend)
    return group


def test_the_stand_in_knows_of_no_end_and_no_failure_but_by_wait() -> None:
    made: list[FailedWork] = []
    failing = backend(made)  # the group doesn't keep it
    work = group_of(failing, 2).allreduce([torch.ones(3)], _c10d.AllreduceOptions())
    assert work is not made[0], MENDED
    assert type(work) is dist.Work, MENDED
    assert not work.is_completed(), MENDED
    assert work.exception() is None, MENDED
    assert work.is_success(), MENDED
    with pytest.raises(lossycoll.PeerLostError) as caught:
        work.wait(timedelta(seconds=3))
    assert caught.value is ERROR
    assert made[0].waited == timedelta(seconds=3)
    assert (work.is_completed(), work.exception(), work.is_success()) == (False, None, True), MENDED


def test_the_stand_in_has_neither_result_nor_source() -> None:
    made: list[FailedWork] = []
    failing = backend(made)
    group = group_of(failing, 2)
    work = group.allreduce([torch.ones(3)], _c10d.AllreduceOptions())
    with pytest.raises(RuntimeError, match="not implemented"):
        work.result()
    work = group.recv_anysource([torch.ones(3)], 0)
    with pytest.raises(RuntimeError, match="sourceRank"):  # which dist.recv asks for
        work._source_rank()


def test_the_same_of_lossys_own_backend() -> None:
    dist.init_process_group("lossy", store=_c10d.HashStore(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert own is not None
        group = group_of(own._get_backend(torch.device("cpu")), 1)
        tensor = torch.ones(3)
        for called, is_own in ((own, True), (group, False)):
            work = called.allreduce([tensor], _c10d.AllreduceOptions())
            work.wait()
            if is_own:
                assert work.result()[0] is tensor
            else:
                with pytest.raises(RuntimeError, match="not implemented"):
                    work.result()
    finally:
        dist.destroy_process_group()

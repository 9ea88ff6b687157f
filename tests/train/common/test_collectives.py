"""Collectives: the one way to send, a single rank without a group, and waiting for several."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.train.common.collectives import BlockGather, Collectives, wait_all
from lossycoll.train.common.delivery import as_elements

TRAIN = Path(lossycoll.__file__).parent / "train"
SENDERS = {
    "common/collectives.py",
    "common/packing.py",
    "elastic/sharing.py",
    "elastic/world.py",
    "sharded/backup.py",
}
"""Those that come back have the default group made anew, and share bytes in it; copies of shards go
from one rank to the next, which is no collective."""
SENDS_NOTHING = {
    *("GradBucket", "GroupMember", "ProcessGroup", "ReduceOp", "group"),
    *("get_rank", "get_world_size", "is_available", "is_initialized"),
}
"""All else of torch.distributed may send: what torch adds later as well."""


def calls_of_dist(source: str) -> list[str]:
    """What a module uses of torch.distributed that may send, however it imports it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="dist"), attr=name):
                found += [name]
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="distributed")):
                found += [node.attr]
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.distributed"):
                found += [each.name for each in node.names]
    return [name for name in found if name not in SENDS_NOTHING]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("dist.all_to_all(x)", ["all_to_all"]),
        ("torch.distributed.reduce(x, 0)", ["reduce"]),
        ("from torch.distributed import isend, ReduceOp", ["isend"]),
        ("from torch.distributed.nn import all_gather", ["all_gather"]),
        ("dist.get_rank(); self.all_reduce(x)", []),
    ],
)
def test_what_sends_is_seen(source: str, expected: list[str]) -> None:
    assert calls_of_dist(source) == expected


def test_no_other_module_of_train_sends() -> None:
    found = {
        str(path.relative_to(TRAIN)): calls
        for path in TRAIN.rglob("*.py")
        if (calls := calls_of_dist(path.read_text(encoding="utf-8")))
    }
    assert set(found) <= SENDERS, found
    assert "common/collectives.py" in found


def test_a_process_without_a_group_is_a_single_rank() -> None:
    single = Collectives(None, optional=True)
    assert (str(single), single.world, single.survivors) == ("rank 0/1", 1, 1)
    assert not single.may_lose
    assert single.agreed_lost() == single.known_lost() == ()
    values = torch.arange(3)
    single.all_reduce(values, dist.ReduceOp.MAX).wait()
    single.all_reduce_gradients(values).wait()
    single.all_gather_chunks(values).wait()
    assert values.tolist() == [0, 1, 2]
    assert single.all_gather(values).tolist() == [[0, 1, 2]]
    assert single.summed(values).tolist() == [0, 1, 2]
    assert single.all_gather_blocks(values).wait().tolist() == [[True]]
    with pytest.raises(lossycoll.UnsupportedError, match="init_process_group"):
        _ = single.group


def test_without_a_group_only_the_optional_ones_work() -> None:
    with pytest.raises(lossycoll.UnsupportedError, match="init_process_group"):
        Collectives(None)


class Ending:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waited = False

    def wait(self) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


def test_all_are_waited_for_and_the_first_failure_is_raised() -> None:
    works = [Ending(), Ending(ValueError("one")), Ending(KeyError("two")), Ending()]
    with pytest.raises(ValueError, match="one"):
        wait_all(works)
    assert all(work.waited for work in works)
    wait_all(works[:1])


def test_what_has_no_result_before_its_end_is_waited_for() -> None:
    everything = np.ones((1, 1), np.bool_)
    work = Ending()
    assert BlockGather(work, lambda: everything).wait_result() is everything
    assert work.waited
    with pytest.raises(ValueError, match="one"):
        BlockGather(Ending(ValueError("one")), lambda: everything).wait_result()


def test_blocks_that_are_lost_as_elements() -> None:
    lost = np.array([[False, True], [True, False]])
    assert as_elements(lost, 2, 3).tolist() == [False, False, True, True, True, False]

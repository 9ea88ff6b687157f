"""Collectives: the one way to send, a single rank without a group, and waiting for several."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.train.common.collectives import Collectives, as_elements, wait_all

TRAIN = Path(lossycoll.__file__).parent / "train"
SENDERS = {"common/collectives.py", "hooks/dispersing.py"}
"""A communication hook must return torch's own future."""
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", "barrier", "send")


def calls_of_dist(path: Path) -> list[str]:
    """The collectives of torch.distributed that a module calls."""
    return [
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "dist"
        and node.attr.startswith(NAMES)
    ]


def test_no_other_module_of_train_sends() -> None:
    found = {
        str(path.relative_to(TRAIN)): calls
        for path in TRAIN.rglob("*.py")
        if (calls := calls_of_dist(path))
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
    assert single.all_gather_survivors(values.view(1, 3)).tolist() == [[[0, 1, 2]]]
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


def test_blocks_that_are_lost_as_elements() -> None:
    lost = np.array([[False, True], [True, False]])
    assert as_elements(lost, 2, 3).tolist() == [False, False, True, True, True, False]

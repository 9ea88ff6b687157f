"""A rank that leaves by an error of its own tells the others which."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support.harness import free_port, init, run_ranks


def rank_shapes(rank: int, world: int) -> None:
    init(timeout=30)
    try:
        DistributedDataParallel(torch.nn.Linear(4, 4 + rank))
        dist.barrier()  # rank 0 was done with its broadcasts, and meets their end here
    finally:
        dist.destroy_process_group()


def test_ddp_with_other_shapes_is_explained_on_both_ranks() -> None:
    first, second = run_ranks(rank_shapes, 2, {"LOSSYCOLL_LOG": "off"})
    assert second.error == "RuntimeError"
    assert "params" in second.text or "shape" in second.text
    assert "left the group after call #" in first.text
    assert f"by RuntimeError: {second.text.splitlines()[0][:80]}" in first.text


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("lossy", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
dist.barrier()
if sys.argv[1] == "1":
    raise ValueError("not caught by anybody")
dist.all_reduce(torch.ones(10))
"""


def test_an_exception_that_ends_the_script_is_named() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", SCRIPT]
    with (
        subprocess.Popen([*command, "0", url], stderr=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1", url], stderr=subprocess.DEVNULL) as second,
    ):
        text = first.communicate(timeout=100)[1]
        second.wait(100)
    assert "PeerLostError" in text
    assert "left the group after call #0, by ValueError: not caught by anybody" in text


def rank_leaves_in_order(rank: int, world: int) -> None:
    init(timeout=30)
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(lossycoll.PeerLostError, match="did it end early"):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def test_a_rank_that_leaves_in_order_gives_no_reason() -> None:
    for outcome in run_ranks(rank_leaves_in_order, 2, {"LOSSYCOLL_LOG": "off"}):
        assert outcome.code == 0, outcome

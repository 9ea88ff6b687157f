"""Tensors that a swarm averages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import lossycoll
from lossycoll import MoshpitAverager, Swarm
from tests.support.swarms import Make, all_do, made_in


@pytest.fixture
def swarms(made: Make) -> list[Swarm]:
    return made(4)


def step(averagers: Sequence[MoshpitAverager], weights: Sequence[float]) -> list[Any]:
    return all_do(len(averagers), lambda i: averagers[i].step(weights[i], timeout=30.0))


def models(count: int) -> list[torch.nn.Module]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3)))
    return made


@pytest.mark.parametrize("grid", [(2, 2), ()])
def test_models_have_the_mean_of_all(grid: tuple[int, ...], swarms: list[Swarm]) -> None:
    peers = models(4)
    wanted = [
        torch.stack([p.detach() for p in same]).mean(0)
        for same in zip(*(model.parameters() for model in peers), strict=True)
    ]
    averagers = [
        MoshpitAverager(swarm, model.parameters(), grid=grid)
        for swarm, model in zip(swarms, peers, strict=True)
    ]
    for number in range(2):
        reports = step(averagers, [1.0] * 4)
        assert {report.round for report in reports} == {number}
        assert {report.failure for report in reports} == {""}
        assert {report.kept for report in reports} == {0.0}
    for model in peers:
        for own, mean in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(own.detach(), mean, rtol=0, atol=1e-6)
            assert own.grad is None


def test_tensors_of_several_types_count_by_weight(swarms: list[Swarm]) -> None:
    peers = [
        [
            torch.full((3, 5), float(i)),
            torch.full((), 2.0 * i, dtype=torch.float16),
            torch.full((7, 2), 8.0 * i, dtype=torch.bfloat16).t(),
        ]
        for i in range(4)
    ]
    averagers = [MoshpitAverager(swarm, own) for swarm, own in zip(swarms, peers, strict=True)]
    step(averagers, [0.0, 1.0, 0.0, 3.0])
    for own in peers:
        assert [tensor.unique().tolist() for tensor in own] == [[2.5], [5.0], [20.0]]
        assert [tensor.dtype for tensor in own] == [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("given", ["", "repair"])
def test_what_is_lost_comes_back_unless_it_may_be_missing(given: str) -> None:
    """What the swarm's options say goes first."""
    options = {"link": "udp", "inject": "loss=0.2,seed=3", **({"repair": 0} if given else {})}
    means = []
    for missing in (None, 0.01):
        with ExitStack() as stack:
            averagers = [
                MoshpitAverager(
                    swarm, [torch.full((40_000,), float(n))], grid=(4,), max_missing=missing
                )
                for n, swarm in enumerate(made_in(stack, 4, **options))
            ]
            rounds = [step(averagers, [1.0] * 4) for _ in range(8)]
        reports = [report for one in rounds[4:] for report in one]
        means.append(sum(report.contributions for report in reports) / len(reports))
    lossy, kept = means
    assert lossy < 3.6, "the fault did not happen"
    # A busy machine loses some more, and what is chosen follows what was measured.
    assert (kept > 3.7) == (not given), means


def test_other_models_are_refused(swarms: list[Swarm]) -> None:
    MoshpitAverager(swarms[0], [torch.zeros(5)])
    for tensors, grid in (
        ([torch.zeros(6)], ()),
        ([torch.zeros(5)], (2, 2)),
        ([torch.zeros(5).half()], ()),
    ):
        with pytest.raises(lossycoll.RendezvousError, match="you average something else than '0'"):
            MoshpitAverager(swarms[1], tensors, grid=grid)
    MoshpitAverager(swarms[1], [torch.ones(5)])


def test_what_cannot_be_averaged(swarms: list[Swarm]) -> None:
    with pytest.raises(lossycoll.OptionError, match="no tensors"):
        MoshpitAverager(swarms[0], [])
    for tensor in (
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(5).to_sparse(),
        torch.zeros(5).double(),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match="wanted dense ones of float32"):
            MoshpitAverager(swarms[0], [tensor])
    with pytest.raises(lossycoll.OptionError, match="max_missing"):
        MoshpitAverager(swarms[0], [torch.zeros(5)], max_missing=1.5)
    for grid, said in (((0, 2), "a grid of 0x2"), ((2.0, 2), "float"), (4, "grid is 4: ")):
        with pytest.raises(lossycoll.OptionError, match=said):
            MoshpitAverager(swarms[0], [torch.zeros(5)], grid=grid)  # type: ignore[arg-type]
    with pytest.raises(lossycoll.RendezvousError, match="4 peers don't fit into a grid of 1x2"):
        MoshpitAverager(swarms[0], [torch.zeros(5)], grid=(1, 2))
    averager = MoshpitAverager(swarms[0], [torch.zeros(5)])
    for weight in (-1.0, 1e9, float("nan")):
        with pytest.raises(lossycoll.OptionError, match="weight is"):
            averager.step(weight)
    assert averager.step(timeout=10.0).members == (0,), "the others average nothing"


def test_parameters_may_get_other_memory(swarms: list[Swarm]) -> None:
    """As by ``vector_to_parameters``: what is averaged is what the parameters are by then."""
    models = [nn.Linear(2, 2, bias=False) for _ in swarms]
    averagers = [MoshpitAverager(one, own, (4,)) for one, own in zip(swarms, models, strict=True)]
    for value, own in enumerate(models):
        vector_to_parameters(torch.full((4,), float(value)), own.parameters())
    reports = step(averagers, [1.0] * 4)
    assert [report.failure for report in reports] == [""] * 4
    assert [own.weight.tolist() for own in models] == [[[1.5, 1.5], [1.5, 1.5]]] * 4
    models[0].to(torch.bfloat16)
    with pytest.raises(lossycoll.OptionError, match=r"number 0: .*float32.* and .*bfloat16"):
        averagers[0].step()


def test_a_directory_that_is_gone_is_no_error_of_the_first_step() -> None:
    with Swarm(join=[(first := Swarm("127.0.0.1:0")).address], may_serve=False) as swarm:
        averager = MoshpitAverager(swarm, [torch.zeros(3)])
        first.close()
        begin = time.monotonic()
        report = averager.step(timeout=1.0)
        assert report.failure
        assert report.round == -1
        assert time.monotonic() - begin < 8, "it waited for longer than it was told to"

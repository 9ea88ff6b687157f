"""Tests about GPUs on one that ranks share: what becomes of the devices that they name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.parallel import distributed as parallel

from .__main__ import outcomes
from .gpu import _page
from .one_gpu import OnGpu0, here, share
from .runner import Outcome


def test_every_gpu_is_the_first_and_nothing_else_changes() -> None:
    assert [here(one) for one in (0, 3, torch.device("cuda", 2), torch.device("cuda"))] == [
        *(0, 0, torch.device("cuda", 0), torch.device("cuda", 0))
    ]
    assert [here(one) for one in ("cuda:7", "cuda")] == ["cuda:0", "cuda:0"]
    for other in (None, True, "cpu", torch.device("cpu"), torch.float32):
        assert here(other) is other


def test_calls_that_name_a_device_name_the_first() -> None:
    given: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))

    mode, tensor = OnGpu0(), torch.zeros(2)
    mode.__torch_function__(make, (), (4,), {"device": 1, "dtype": torch.int8})
    assert given == [((4,), {"device": 0, "dtype": torch.int8})]
    with mode:
        assert tensor.to(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="cpu").is_cpu
        assert tensor.sum(0).item() == 0  # other numbers than devices stay


def test_the_suite_alone_sees_more_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.cuda, parallel):
        monkeypatch.setattr(module, "_get_device_index", module._get_device_index)
    suite: Any = ModuleType("suite")
    real = torch.cuda.device_count()
    share([suite], 5)
    assert suite.torch.cuda.device_count() == 5
    assert torch.cuda.device_count() == real
    assert suite.torch.Tensor is torch.Tensor
    assert parallel._get_device_index(3, True) == 0
    assert parallel._get_device_index(torch.device("cuda", 2)) == 0


@pytest.mark.long
def test_parts_are_all_of_the_tests() -> None:
    """Where there is no GPU, or no other backend's, each says why it is left out."""
    names = ["test_all_reduce_sum_cuda", "test_barrier_cuda", "test_gather_cuda"]
    found: list[str] = []
    for part in ("1/2", "2/2"):
        for name, outcome in outcomes("reliable", 2, names, "--one-gpu", "--part", part):
            found.append(name)
            assert outcome.kind in ("pass", "skip"), outcome
    assert found == [names[0], names[2], names[1]]


def test_the_page_says_where_lossy_fails_alone() -> None:
    bad = Outcome("fail", "why")
    runs = {
        "gloo": {"test_a": Outcome("pass"), "test_b": bad, "test_c": Outcome("skip", "no GPU")},
        "reliable": {"test_a": bad, "test_b": bad, "test_c": Outcome("skip", "no GPU")},
    }
    text = _page(runs, 2, ["part 3 is missing"])
    assert "not as known: test_a (reliable, 2 ranks): fail where gloo passes: why" in text
    assert "not as known: part 3 is missing" in text
    assert "| `test_b` | fail | fail |" in text
    assert "test_c" not in text
    assert text.count("not as known") == 2

"""Where a program or framework asks for gloo by name, lossy serves; and back again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import replacement
from lossycoll.errors import OptionError, UnsupportedError
from lossycoll.options.fields import Options
from tests.support.harness import Ranks


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("gloo", "lossy"),
        ("nccl", "nccl"),
        ("lossy", "lossy"),
        ("fake", "fake"),
        ("cpu:gloo", "lossy"),
        ("cpu:gloo,cuda:gloo", "lossy"),
        ("cpu:gloo,cuda:nccl", "cpu:lossy,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:lossy"),
    ],
)
def test_gloo_is_replaced_and_nothing_else(asked: str, made: str) -> None:
    assert replacement.replaced(asked) == made


def test_what_torch_chooses_by_itself_is_replaced_where_it_is_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, made in (("cpu", "lossy"), ("cuda", "undefined"), ("xpu", "undefined")):
        found = type("Device", (), {"type": device})
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda found=found: found)
        assert replacement.replaced("undefined") == made
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: type("Device", (), {"type": "mps"}))
    with pytest.raises(UnsupportedError, match="gloo on mps"):
        replacement.replaced("undefined")
    with pytest.raises(UnsupportedError, match="gloo on mps"):
        replacement.replaced("mps:gloo,cpu:gloo")


def test_the_option_is_of_the_environment_alone() -> None:
    assert Options.resolve(None, {"LOSSYCOLL_REPLACE": "gloo"}).replace == "gloo"
    again = Options.resolve(None, {"LOSSYCOLL_REPLACE": "gloo"})
    assert Options.resolve(again, {"LOSSYCOLL_REPLACE": "gloo"}).replace == "gloo"
    with pytest.raises(OptionError, match="LOSSYCOLL_REPLACE"):
        Options.resolve({"replace": "gloo"}, {})
    with pytest.raises(OptionError, match="gloo"):
        Options.resolve(None, {"LOSSYCOLL_REPLACE": "nccl"})


def _refusal(call: Any) -> str:
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return "none"


def rank_asks_for_gloo(rank: int, world: int) -> dict[str, Any]:
    """A program that knows nothing of lossy, but for the end."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    options = dist.distributed_c10d.ProcessGroupGloo._Options()
    groups: dict[str, Any] = {
        "default": dist.group.WORLD,
        "by name": dist.new_group(backend="gloo"),
        "by enum": dist.new_group(backend=dist.Backend.GLOO),
        "inherited": dist.new_group(),
        "by device": dist.new_group(backend="cpu:gloo,cuda:gloo"),
        "mesh": init_device_mesh("cpu", (world,)).get_group(),
    }
    kinds = {
        name: (type(group).__name__, dist.get_backend(group)) for name, group in groups.items()
    }
    sums = []
    for group in groups.values():
        t = torch.full((1000,), 1.0 + rank)
        dist.all_reduce(t, group=group)
        sums.append(float(t[0]))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    refused = [
        _refusal(lambda: dist.new_group(backend="mps:gloo")),
        _refusal(lambda: dist.new_group(backend="gloo", pg_options=options)),
        _refusal(lambda: dist.ProcessGroupGloo(store, rank, world)),
    ]

    lossycoll.stop_replacing()
    lossycoll.stop_replacing()
    real = dist.new_group(backend="gloo")
    t = torch.ones(3)
    dist.all_reduce(t, group=real)
    after = dist.get_backend(real), type(real).__name__, float(t[0])
    is_theirs = dist.ProcessGroupGloo is dist.distributed_c10d.ProcessGroupGloo
    dist.barrier()
    dist.destroy_process_group()
    return {
        "kinds": kinds, "sums": sums, "refused": refused, "after": after, "is_theirs": is_theirs
    }  # fmt: skip


def test_a_program_that_asks_for_gloo_gets_lossy_until_it_is_undone() -> None:
    env = {"LOSSYCOLL_REPLACE": "gloo"}
    with Ranks(rank_asks_for_gloo, 2, env, fresh=True) as ranks:
        ended = ranks.collect(120)
        said = [ranks.output(rank) for rank in range(2)]
    for one in ended:
        assert not one.error, str(one)
        found = one.value
        for name, kind in found["kinds"].items():
            assert kind == ("LossyProcessGroup", "lossy"), name
        assert found["sums"] == [3.0] * len(found["kinds"])
        device, options, direct = found["refused"]
        assert "gloo on mps" in device
        assert "ProcessGroupGloo._Options" in options
        assert "ProcessGroupGloo(...)" in direct
        assert found["after"] == ("gloo", "ProcessGroup", 2.0)
        assert found["is_theirs"]
    for text in said:
        lines = [line for line in text.splitlines() if "event=replaces" in line]
        assert len(lines) == 1, text
        assert "asked=gloo made=lossy" in lines[0]


def _imported(**env: str) -> str:
    """What torch makes of gloo in a fresh process, and warnings of its import."""
    code = (
        "import torch.distributed as d; print(d.distributed_c10d._new_process_group_helper"
        ".__module__, hasattr(d.distributed_c10d._new_process_group_helper, '__wrapped__'))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_it_is_off_by_default_and_a_wrong_value_is_told() -> None:
    assert "False" in _imported()
    wrong = _imported(LOSSYCOLL_REPLACE="nccl")
    assert "False" in wrong
    assert "LOSSYCOLL_REPLACE replaces nothing: 'nccl', wanted gloo" in wrong


def test_torch_can_be_imported_where_warnings_are_errors() -> None:
    wrong = _imported(LOSSYCOLL_REPLACE="nccl", PYTHONWARNINGS="error:lossycoll")
    assert "False" in wrong
    assert "LOSSYCOLL_REPLACE replaces nothing: 'nccl', wanted gloo" in wrong

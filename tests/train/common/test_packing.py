"""States as bytes and back."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lossycoll.errors import CheckpointError
from lossycoll.train.common.packing import DTYPES, packed, unpacked


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


def test_all_that_a_state_can_hold() -> None:
    state = {
        "none": None,
        3: [True, 1, 0.1, float("inf"), "text"],
        "betas": (0.9, 0.999),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5.0),
        "turned": torch.arange(12).reshape(3, 4).t(),
        **{name: torch.tensor([[1, 0, 1]], dtype=dtype) for name, dtype in DTYPES.items()},
    }
    skeleton, data = packed(state)
    assert data.dtype == np.uint8
    assert same(unpacked(skeleton, data), state)


def test_optimizers_go_on_from_it() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 5)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    read = unpacked(*packed(state))
    assert same(read, state)
    other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    other.load_state_dict(read["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(read["optimizer"])


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2, 2).to_sparse(), 1 + 2j])
def test_what_a_state_cannot_hold(value: object) -> None:
    with pytest.raises(CheckpointError):
        packed({"x": value})


def test_what_is_no_state() -> None:
    skeleton, data = packed({"a": torch.ones(3), "b": [1, torch.zeros(2, dtype=torch.int8)]})
    for broken in (
        b"",
        b"[",
        b"1",
        b'["q",1]',
        b'["v",[1]]',
        b'["d",[[["v",1]]]]',
        b'["x","float31",[3]]',
        b'["x","float32",[-1]]',
        b'["x","float32",["3"]]',
        b'["x","float32",[99999999]]',
        b'["x","float32",[1]]',
        b'["d",[[["l",[]],["v",1]]]]',
        b"[" * 100_000,
        json.dumps(["l", [["l", [["l", []]]]]]).encode(),
        b'["l",[' * 40 + b"]]" * 40,
    ):
        with pytest.raises(CheckpointError):
            unpacked(broken, data)
    with pytest.raises(CheckpointError):
        unpacked(skeleton, data[:-1])
    random = np.random.default_rng(0)
    for _ in range(500):
        mangled = bytearray(skeleton)
        mangled[int(random.integers(len(mangled)))] = int(random.integers(256))
        with contextlib.suppress(CheckpointError):
            unpacked(bytes(mangled), data)


def test_one_element_of_a_stride() -> None:
    """torch takes it for contiguous, and doesn't view it as bytes."""
    one = torch.arange(3.0)[1::2]
    assert one.stride() == (2,)
    state = {"one": one}
    assert same(unpacked(*packed(state)), state)

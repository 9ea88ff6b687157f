"""Buckets as data: every element has one place and one owner."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from lossycoll.train.common.layout import (
    ALIGNMENT,
    Bucket,
    ParameterSpec,
    is_dense,
    lay_out,
)


def spec(*shape: int, itemsize: int = 4, key: str = "a") -> ParameterSpec:
    return ParameterSpec(shape, torch.empty(shape, device="meta").stride(), itemsize, key)


def check_buckets(buckets: list[Bucket], specs: list[ParameterSpec], world: int) -> None:
    """Every element of every parameter has one place and one owner, and nothing else has."""
    members = [member for bucket in buckets for member in bucket.members]
    assert sorted(member.index for member in members) == list(range(len(specs)))
    for bucket in buckets:
        itemsize = specs[bucket.members[0].index].itemsize
        assert len(bucket.counts) == world
        assert bucket.size == sum(bucket.counts)
        assert all(count * itemsize % ALIGNMENT == 0 for count in bucket.counts)
        end = 0
        for member in bucket.members:
            assert specs[member.index].key == bucket.key
            assert member.begin >= end
            assert member.begin * itemsize % ALIGNMENT == 0
            assert member.end - member.begin == specs[member.index].numel
            end = member.end
        assert end <= bucket.size
        owned = np.zeros(bucket.size, int)
        for rank in range(world):
            for fragment in bucket.fragments(rank):
                own = bucket.chunk(rank)
                assert own.start <= fragment.begin < fragment.end <= own.stop
                assert fragment.member.begin <= fragment.begin
                assert fragment.end <= fragment.member.end
                assert fragment.offset == fragment.begin - fragment.member.begin
                owned[fragment.begin : fragment.end] += 1
        wanted = np.zeros(bucket.size, int)
        for member in bucket.members:
            wanted[member.begin : member.end] = 1
        np.testing.assert_array_equal(owned, wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
def test_every_element_has_one_owner(world: int) -> None:
    draw = random.Random(world)
    for _ in range(40):
        specs = []
        for _ in range(draw.randint(1, 12)):
            key = draw.choice("abc")
            shape = [draw.choice([0, 1, 2, 5, 17, 64]) for _ in range(draw.randint(0, 3))]
            specs.append(spec(*shape, itemsize={"a": 4, "b": 2, "c": 8}[key], key=key))
        buckets = lay_out(specs, world, draw.choice([1, 300, 5000, 10**7]), draw.choice([1, 700]))
        check_buckets(buckets, specs, world)


def test_few_ranks_own_a_short_bucket_and_the_next_ones_the_next() -> None:
    specs = [spec(64 * (index + 1)) for index in range(9)]
    world, few = 5, 2
    buckets = lay_out(specs, world, 1200, owners=lambda nbytes: few)
    check_buckets(buckets, specs, world)
    owners = [[rank for rank, count in enumerate(each.counts) if count] for each in buckets]
    turns = [sorted({(few * number + i) % world for i in range(few)}) for number in range(9)]
    assert len(owners) > 3
    assert owners == turns[: len(owners)]
    for bucket in buckets:
        assert len(set(bucket.counts)) == 2  # 0, and as many as the other owner's
    (whole,) = lay_out(specs, world, 1200, whole=True, owners=lambda nbytes: few)
    held = [[fragment.member.index for fragment in whole.fragments(rank)] for rank in range(world)]
    assert sorted(held[0] + held[1]) == list(range(9))
    assert held[0]
    assert held[1]
    assert not any(held[few:])


def test_a_bucket_has_as_many_owners_as_its_bytes_ask_for() -> None:
    specs = [spec(64), spec(256)]
    asked: list[int] = []

    def owners(nbytes: int) -> int:
        asked.append(nbytes)
        return 1 if nbytes < 1000 else 3

    small, large = sorted(lay_out(specs, 3, 1100, owners=owners), key=lambda one: one.size)
    assert sorted(asked) == [256, 1024]
    assert sorted(small.counts) == [0, 0, 64]
    assert all(large.counts)


def test_buckets_are_in_the_order_of_the_backward_pass() -> None:
    specs = [spec(100, key="ab"[i % 2]) for i in range(8)]
    buckets = lay_out(specs, 2, bucket_bytes=900, first_bytes=400)
    last = [min(member.index for member in bucket.members) for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert [member.index for member in buckets[0].members] == [7]  # the first one is smaller
    assert [member.index for member in buckets[1].members] == [6, 4]
    assert [member.index for member in buckets[2].members] == [5, 3]


def test_a_large_parameter_has_a_bucket_of_its_own_and_indices_go_on() -> None:
    specs = [spec(10), spec(5000), spec(10), spec(10)]
    buckets = lay_out(specs, 3, bucket_bytes=1000, start=7)
    members = [[member.index for member in bucket.members] for bucket in buckets]
    assert members == [[10, 9], [8], [7]]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(1, 5).expand(3, 5), False),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(4, 1)[:, :1], True),
    ],
)
def test_dense_is_as_torch_has_it(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense

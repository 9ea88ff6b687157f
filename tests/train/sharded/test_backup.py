"""Each shard's state kept twice: what survivors put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.errors import CheckpointError, OptionError
from lossycoll.train.common.packing import packed, unpacked
from lossycoll.train.sharded.backup import ShardBackup, assembled, chosen, gathered, partners
from lossycoll.train.sharded.checkpoint import FragmentState, ShardState
from tests.support.harness import EXACT, init, run_good
from tests.train.sharded.test_checkpoint import CASES, ENV, bits, made, same, train

WORLD = 3


def copies(rank: int, world: int) -> dict[str, Any]:
    """Trains, copies, and lets some of the ranks put the whole state together."""
    init()
    out: dict[str, Any] = {}
    groups = {"two": [0, 1], "one": [0], "all": [0, 1, 2]}
    made_of = {name: dist.new_group(ranks) for name, ranks in groups.items()}
    for name in CASES:
        model, optimizer = made(name)
        backup = ShardBackup(optimizer, every=1)
        train(model, optimizer, 0, 3, same)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        train(model, optimizer, 3, 2, same)
        for _ in range(2):  # the second takes what the first has sent
            backup.step()
        optimizer.consolidate_state_dict(to=0)
        found = {"whole": bits(optimizer.state_dict()) if rank == 0 else None}
        for group_name, ranks in groups.items():
            if rank not in ranks:
                continue
            # In "all" rank 2 is one that was started anew.
            mine = None if group_name == "all" and rank == 2 else backup
            try:
                states = gathered(mine, made_of[group_name])
                whole = assembled(states, optimizer._store)
                found[group_name] = bits(whole)
            except CheckpointError as error:
                found[group_name] = str(error)
        out[name] = found
        # A new optimizer goes on as the old one.
        again_model, again = made(name)
        again_model.load_state_dict(model.state_dict())
        again.synchronize_parameters()
        assert again.restore_shards(None if rank == 2 else backup)
        assert again.shard_era == 1
        assert not made(name)[1].restore_shards(None)
        for one, other in ((model, optimizer), (again_model, again)):
            with lossycoll.reliable():
                train(one, other, 5, 3, same)
            other.synchronize_parameters()
        pairs = zip(model.parameters(), again_model.parameters(), strict=True)
        found["goes on"] = all(torch.equal(a, b) for a, b in pairs)
    return out


def test_survivors_have_the_whole_state() -> None:
    values = run_good(copies, WORLD, {**ENV, **EXACT})
    for name in CASES:
        whole = values[0][name]["whole"]
        for rank in (0, 1):
            assert values[rank][name]["two"] == whole, name
        for rank in range(WORLD):
            assert values[rank][name]["all"] == whole, name
            assert values[rank][name]["goes on"], name
        assert "shards of ranks [1] of 3 is lost" in values[0][name]["one"]


def copies_of_two_hosts(rank: int, world: int) -> dict[str, Any]:
    """Trains and copies; then the ranks of each host put the whole state together by themselves."""
    init()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model, optimizer = made(next(iter(CASES)))
    backup = ShardBackup(optimizer, every=1)
    train(model, optimizer, 0, 3, same)
    for _ in range(2):
        backup.step()
    states = gathered(backup, groups[rank // 2])
    whole = assembled(states, optimizer._store)
    optimizer.consolidate_state_dict(to=0)
    return {"left": bits(whole), "whole": bits(optimizer.state_dict()) if rank == 0 else None}


def test_the_ranks_of_one_host_have_the_whole_state() -> None:
    """The other host has lost its power."""
    hosts = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(4)}
    values = run_good(copies_of_two_hosts, 4, {**ENV, **EXACT}, per_rank=hosts)
    for value in values:
        assert value["left"] == values[0]["whole"]


@pytest.mark.parametrize(
    ("hosts", "at_home"),
    [
        ((0, 0, 1, 1), 0),
        ((0, 1, 0, 1), 0),
        ((0, 0, 0, 1, 1, 2), 0),
        ((0, 0, 0, 1), 2),  # host 1 has room for one copy of another
        ((0, 1, 2, 0), 0),
        ((0, 0, 0), 3),
        ((0, 1), 0),
    ],
)
def test_a_copy_is_on_another_host_where_there_is_one(hosts: tuple[int, ...], at_home: int) -> None:
    found = [partners(hosts, rank) for rank in range(len(hosts))]
    assert sum(hosts[to] == hosts[rank] for rank, (to, _) in enumerate(found)) == at_home
    for rank, (to, source) in enumerate(found):
        assert to != rank
        assert found[to][1] == rank
        assert found[source][0] == rank


NONE = [-1, -1, -1, -1]


def label(rank: int, world: int = 3, steps: int = 1, era: int = 0) -> list[int]:
    return [era, world, rank, steps]


def test_the_latest_of_each_is_taken() -> None:
    rows = [[label(0, steps=5), label(2, steps=3)], [label(1, steps=6), label(0, steps=4)]]
    assert chosen(rows) == [(0, 0), (1, 0), (0, 1)]
    assert chosen([[NONE, NONE], *rows]) == [(1, 0), (2, 0), (1, 1)]


def test_what_is_of_an_older_group_is_left() -> None:
    """However many steps that had."""
    old = [label(0, steps=500), label(1, steps=491)]
    new = [[label(0, era=1), label(1, era=1)], [label(2, era=1), NONE]]
    assert chosen([old, *new]) == [(1, 0), (1, 1), (2, 0)]
    other = [label(0, world=2, steps=500), label(1, world=2, steps=500)]
    assert chosen([*new, other]) == [(0, 0), (0, 1), (1, 0)]


def test_nobody_has_a_state() -> None:
    assert chosen([[NONE, NONE]] * 3) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[label(0), label(1, world=2)]], r"of groups of \[2, 3\] ranks"),
        ([[label(1), NONE]], r"ranks \[0, 2\] of 3 is lost"),
    ],
    ids=str,
)
def test_what_is_no_whole_state_is_refused(rows: list[list[list[int]]], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        chosen(rows)


@pytest.mark.parametrize(
    "plain",
    [
        None,
        5,
        [1, 2],
        (0, 3, 1, 1, ((1,),), ()),
        (0, 3, 1, 1, 7, ()),
        (0, 3, 3, 1, (), ()),
        (0, 3, -1, 1, (), ()),
        (0, 3, 1, 1.5, (), ()),
        (0, 3, 1, 1, ((0, 5, 4, {}),), ()),
        (0, 3, 1, 1, ((0, 1, 4, []),), ()),
        (0, 3, 1, 1, (), (1,)),
        (0, 3, 1, 1, (), {}),
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(plain: Any) -> None:
    with pytest.raises(CheckpointError, match="no state of a shard"):
        ShardState.of_plain(plain)


def test_a_state_travels() -> None:
    fragment = FragmentState(3, 0, 2, {"step": torch.tensor(4.0)})
    one = ShardState(1, 2, 1, 9, (fragment,), ({"lr": 1},))
    assert ShardState.of_plain(unpacked(*packed(one))) == one


@pytest.mark.parametrize("every", [0, -1, 1.5, True], ids=str)
def test_every_is_checked(every: Any) -> None:
    with pytest.raises(OptionError, match="wanted a whole number"):
        ShardBackup(None, every)

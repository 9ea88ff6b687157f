"""Each shard's state kept twice: what survivors put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.errors import CheckpointError, OptionError
from lossycoll.train.sharded.backup import ShardBackup, assembled, gathered, latest
from lossycoll.train.sharded.shard_state import FragmentState, ShardState
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
                whole = assembled(states, optimizer._store, optimizer._model_groups.param_groups)
                found[group_name] = bits(whole)
            except CheckpointError as error:
                found[group_name] = str(error)
        out[name] = found
        # A new optimizer goes on as the old one.
        again_model, again = made(name)
        again_model.load_state_dict(model.state_dict())
        again.synchronize_parameters()
        again.restore_shards(None if rank == 2 else backup)
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


def shard(rank: int, world: int = 3, steps: int = 1) -> ShardState:
    return ShardState(rank, world, steps, (), ({"lr": 0.1},))


def test_the_latest_of_each_is_taken() -> None:
    found = [shard(1, steps=4), shard(0, steps=5), shard(1, steps=6), shard(2), shard(1, steps=5)]
    assert latest(found) == [shard(0, steps=5), shard(1, steps=6), shard(2)]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([], r"of groups of \[\] ranks"),
        ([shard(0), shard(1, 2)], r"of groups of \[2, 3\] ranks"),
        ([shard(1)], r"ranks \[0, 2\] of 3 is lost"),
    ],
    ids=str,
)
def test_what_is_no_whole_state_is_refused(found: list[ShardState], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        latest(found)


@pytest.mark.parametrize(
    "plain", [None, 5, [1, 2], [0, 3, 1, [[1]], []], [0, 3, 1, 7, []]], ids=str
)
def test_what_is_no_state_is_refused(plain: Any) -> None:
    with pytest.raises(CheckpointError, match="no state of a shard"):
        ShardState.of_plain(plain)


def test_a_state_travels() -> None:
    one = ShardState(1, 2, 9, (FragmentState(3, 0, 2, {"step": torch.tensor(4.0)}),), ({"lr": 1},))
    assert ShardState.of_plain(one.to_plain()) == one


@pytest.mark.parametrize("every", [0, -1, 1.5, True], ids=str)
def test_every_is_checked(every: Any) -> None:
    with pytest.raises(OptionError, match="wanted a whole number"):
        ShardBackup(None, every)

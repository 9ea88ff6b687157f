"""All peers of a swarm are killed at once, and started again by the same command lines."""

from __future__ import annotations

import pytest

from benchmarks.micro.directory import valkey_binary
from benchmarks.micro.mass_restart import HEAD, WAYS, Restart, restart, row
from tests.support.harness import warm_python


@pytest.mark.parametrize(
    ("way", "peers"),
    [
        ("directory", 4),
        *(pytest.param(way, 16, marks=[pytest.mark.long, pytest.mark.serial]) for way in WAYS),
    ],
)
def test_all_that_were_killed_are_one_swarm_with_the_newest_state(way: str, peers: int) -> None:
    if way == "valkey":
        pytest.importorskip("valkey", reason="the package valkey isn't installed")
        if valkey_binary() is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
    found = restart(way, peers, seed=peers, older=4.0, python=warm_python())
    assert found.sessions == 1, found
    assert found.oldest < found.newest, found
    assert found.is_newest, found
    assert found.samples >= found.newest, found


def test_a_row_says_what_differed() -> None:
    good = Restart(4.0, 9.04, 1, 2400, 160, 2600, is_newest=True)
    bad = Restart(6.0, 12.0, 2, 2480, 160, 1300, is_newest=False)
    found = dict(zip(HEAD, row("list", 16, [good, bad]), strict=True))
    assert found["swarms"] == "1, 2"
    assert found["first round of all, s after the last import: median, longest"] == "10.5, 12.0"
    assert found[HEAD[-1]] == "2,600; 1,300 (the newest in 1 of 2)"
    assert row("list", 16, [good])[-1] == "2,600"

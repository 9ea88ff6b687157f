"""Times of a swarm on one machine: small ones of what the command measures."""

from __future__ import annotations

import pytest

from benchmarks.micro import loopback_swarm
from benchmarks.micro.loopback_swarm import first_round, rounds, starts_row
from tests.support.harness import warm_python


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_swarm.sys, "executable", warm_python())


def test_a_swarm_has_its_first_round_after_its_imports() -> None:
    imported, done = first_round(2)
    assert 0 < imported < done
    row = starts_row(2, "first round of all", 1.0, [(1.0, 2.0), (2.0, 4.0)])
    assert row == ["2", "first round of all", "2", "1", "1.5", "3.0, 4.0"]


@pytest.mark.long
def test_a_newcomer_has_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_swarm, "STATE_MIB", 3.0)
    imported, done = loopback_swarm.newcomer()
    assert 0 < imported < done


@pytest.mark.parametrize("link", ["auto", "udp"])
def test_rounds_of_a_wire(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_swarm, "ROUND_MIB", 1.0)
    found = rounds(2, 2, "int8", link)
    assert len(found) == 2
    assert min(found) > 0

"""A job's status as text: what to look at first, and nothing that only follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lossycoll.cli.status import as_text, culprits
from tests.cli.test_top import job, link, rank, shown, waiting


def test_all_troubles_are_named_and_each_once() -> None:
    found = culprits(job(waiting(0, 1), rank(1), rank(2, state="stopped"), waiting(3, 1)))
    assert found == [
        "rank 1, which is alive: 2 wait for it, 12.5 s in all_reduce float32[9]",
        "rank 2 is stopped",
    ]
    assert "1 waits for it" in culprits(job(waiting(0, 1), rank(1)))[0]


def test_links_are_told_by_direction() -> None:
    silent = {"trouble": "nothing comes"}
    unheard = {"trouble": "nothing arrives there"}
    found = culprits(job(rank(0, link=[link(1, 0.2)]), rank(1, link=[link(0) | silent]), rank(2)))
    assert found == [
        "link from rank 0 to rank 1: loses 20.0%",
        "link from rank 0 to rank 1: nothing comes",
    ]
    assert culprits(job(rank(0, link=[link(1) | unheard]), rank(1))) == [
        "link from rank 0 to rank 1: nothing arrives"
    ]


def test_what_recovery_does_not_restore_is_told_with_the_loss() -> None:
    def told(missing: float) -> list[str]:
        receiver = rank(1, link=[link(2) | {"missing": 0.5}, link(0) | {"missing": missing}])
        return culprits(job(rank(0, link=[link(1, 0.2)]), receiver, rank(2)))

    assert told(0.031) == ["link from rank 0 to rank 1: loses 20.0%, 3.1% stay missing"]
    assert told(0.0001) == ["link from rank 0 to rank 1: loses 20.0%"]
    silent = rank(1, link=[])  # it tells nothing
    assert culprits(job(rank(0, link=[link(1, 0.2)]), silent))[0].endswith("loses 20.0%")


def test_without_a_job_the_folder_is_named_in_which_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert as_text([]).startswith(
        f"no job or swarm of this user has a page in {tmp_path}/lossycoll;"
    )
    assert "XDG_RUNTIME_DIR" in as_text([])


def test_a_link_to_a_rank_that_does_not_run_is_no_trouble_of_its_own() -> None:
    for state in ("stopped", "dead", "silent"):
        gone = rank(1, state=state, link=[link(0) | {"trouble": "nothing comes"}])
        ranks = job(rank(0, link=[link(1) | {"trouble": "nothing comes"}]), gone)
        (only,) = culprits(ranks)
        assert only.startswith(f"rank 1 is {state}")


def test_a_silent_rank_was_heard_a_while_ago_and_a_stopped_one_is_known_to_be() -> None:
    found = culprits(job(*(rank(i, state=s) for i, s in enumerate(("silent", "stopped", "dead")))))
    assert found == ["rank 0 is silent, heard 0 ms ago", "rank 1 is stopped", "rank 2 is dead"]


def test_a_rank_that_has_ended_in_order_has_left() -> None:
    assert culprits(job(rank(0), rank(1, state="left"))) == ["rank 1 has left, heard 0 ms ago"]
    assert culprits(job(waiting(0, 1), rank(1, state="left")))[0].startswith(
        "rank 1, which has left"
    )


def test_ranks_that_nobody_listens_for_are_no_trouble() -> None:
    """On the machine of a killed rank nothing is known of the others."""
    other = {"tells": False, "control": None, "link": [], "heard_seconds": None}
    jobs = [job(rank(0, state="dead"), rank(1, state="unknown", **other))]
    assert culprits(jobs[0]) == ["rank 0 is dead"]
    assert "rank 1: unknown, no rank runs here that could tell of it" in as_text(jobs)
    assert as_text(jobs, by_pages=True).splitlines()[-1] == (
        "rank 1: on other machines; `lossycoll status HOST:PORT` asks those, too"
    )


def test_a_look_at_the_pages_says_how_to_ask_other_machines() -> None:
    other = rank(1, tells=False, control=None, link=[])
    jobs = [job(rank(0), other, other | {"rank": 2})]
    said = "ranks 1, 2: on other machines; `lossycoll status h:1` asks those, too"
    assert as_text(jobs, by_pages=True).splitlines()[-1] == said
    assert said not in as_text(jobs)
    assert said not in as_text([job(rank(0), rank(1))], by_pages=True)


def test_a_call_that_all_have_made_waits_for_packets() -> None:
    assert culprits(job(waiting(0), waiting(1))) == [
        "ranks 0, 1: wait for packets, 12.5 s in call #4 all_reduce float32[9]"
    ]
    short = waiting(0) | {"call_seconds": 0.5}
    assert culprits(job(short, short | {"rank": 1})) == []
    untold = rank(1, tells=False, link=[])  # it may be late
    assert culprits(job(waiting(0), untold)) == []


@pytest.mark.parametrize("state", ["dead", "left"])
def test_a_rank_that_has_ended_waits_for_nothing(state: str) -> None:
    jobs = [job(waiting(0) | {"state": state}, rank(1))]
    text = as_text(jobs)
    assert f"rank 0 node/7: {state}, ended in call #4 all_reduce float32[9]" in text
    assert "wait" not in text
    assert "12.5 s" not in text + shown(jobs, 132)


def test_after_stacks_what_to_look_at_first_is_said_again() -> None:
    ranks = [waiting(0, 1) | {"stacks": "thread MainThread:\n  x"}, rank(1) | {"stacks": None}]
    lines = as_text([job(*ranks)]).splitlines()
    first = lines[1]
    assert first.strip().startswith("rank 1, which is alive: 1 waits for it")
    assert lines[-2:] == ["again, what to look at first:", first]
    assert "again" not in as_text([job(waiting(0, 1), rank(1))])
    assert "again" not in as_text([job(rank(0) | {"stacks": "x"})])

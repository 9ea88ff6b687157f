"""A job's status from records of some of its processes: who waits for whom, and who is what."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import (
    CallRecord,
    GroupRecord,
    PeerRecord,
    Record,
)
from lossycoll.runtime.world.job_status import given_up, job_of, jobs_of
from lossycoll.runtime.world.rank_states import RankState

WORLD = 4
PAGE = Path(__file__).resolve().parents[3] / "docs" / "status-reference.md"


def peer(rank: int, heard: float = 0.5, state: int = RankState.PRESENT) -> PeerRecord:
    return PeerRecord(rank, heard, state, 0, 0, 0, 90, 10, 0.001, 0.0, 1e6, 0.2, 3.0)


def call(op: int, began: float = 2.0, ended: float = -1.0, **rest: Any) -> CallRecord:
    return CallRecord(op, op + 99, "all_reduce", 4, -1, began, ended, False, **rest)


def record(process: int, op: int, *, waits: bool = True, state: str = status_page.RUNS) -> Record:
    """A process that waits in operation ``op``, or has done it."""
    latest = call(op) if waits else call(op, 3.0, 1.0)
    group = GroupRecord(
        number=5,
        name="0",
        rank=process,
        members=tuple(range(WORLD)),
        submitted=op,
        failed=0,
        usual=0.1,
        waiting=latest if waits else None,
        pending=int(waits),
        last=latest,
        messages=(),
        absent_of=op if waits else 0,
        absent=(),
        step_seconds=0.25,
    )
    return Record(
        session="ab",
        world=WORLD,
        process=process,
        rank=process,
        pid=100 + process,
        host="h",
        control="h:1",
        sealed=False,
        liveness=10.0,
        state=state,
        written=0.0,
        groups=(group,),
        peers=tuple(map(peer, range(WORLD))),
        stats={"packets_missing": 1, "packets_received": 3, "packets_recovered": 2},
    )


def with_group(of: Record, **changes: Any) -> Record:
    return replace(of, groups=(replace(of.groups[0], **changes),))


def with_peer(of: Record, process: int, **changes: Any) -> Record:
    changed = [replace(p, **changes) if i == process else p for i, p in enumerate(of.peers)]
    return replace(of, peers=tuple(changed))


def waits_for(*records: Record) -> list[list[int]]:
    return [rank["waits_for"] for rank in job_of("ab", records)["ranks"]]


def states(*records: Record) -> list[str]:
    return [rank["state"] for rank in job_of("ab", records)["ranks"]]


def test_those_are_waited_for_that_have_not_made_the_call_and_not_those_that_wait() -> None:
    all_of_them = [record(0, 7), record(1, 7), record(2, 6, waits=False), record(3, 7)]
    assert waits_for(*all_of_them) == [[2], [2], [], [2]]
    thirty = [record(0, 7), *(record(i, 6, waits=False) for i in (1, 2, 3))]
    assert waits_for(*thirty) == [[1, 2, 3], [], [], []]


def test_a_rank_that_waits_in_an_earlier_call_is_waited_for_in_a_later_one() -> None:
    found = waits_for(record(0, 8), record(1, 7), record(2, 6, waits=False), record(3, 8))
    assert found == [[1, 2], [2], [], [1, 2]]


def test_a_stopped_rank_that_has_made_the_call_is_waited_for_if_all_have() -> None:
    stopped = record(2, 7, state=status_page.STOPPED)
    assert waits_for(record(0, 7), record(1, 7), stopped, record(3, 7))[0] == [2]
    assert states(record(0, 7), stopped)[2] == "stopped"


def test_a_rank_that_was_given_up_is_not_waited_for() -> None:
    """A group that continues without it waits for others, or for packets."""
    survivors = [with_peer(record(i, 7), 2, state=RankState.LOST) for i in (0, 1, 3)]
    assert waits_for(*survivors) == [[], [], [], []]
    killed = record(2, 7, state=status_page.DEAD)
    assert waits_for(killed) == [[], [], [], []]
    late = with_peer(record(3, 6, waits=False), 2, state=RankState.LOST)
    assert waits_for(*survivors[:2], late) == [[3], [3], [], []]


def test_what_a_rank_tells_nothing_of_the_engine_of_another_one_knows() -> None:
    told = with_group(record(0, 7), absent=(3,))
    assert waits_for(told, record(1, 7))[0] == [3]
    assert waits_for(record(0, 7), record(1, 7), record(2, 7)) == [[], [], [], []]
    # Of another operation than the one that is waited for nothing follows, but of one who is gone.
    stale = with_group(record(0, 7), absent_of=6, absent=(2,))
    assert waits_for(stale, record(1, 7)) == [[], [], [], []]
    silent = [with_peer(stale, 3, heard=-1.0), with_peer(record(1, 7), 3, heard=-1.0)]
    assert waits_for(*silent)[0] == [3]


ROOT: tuple[str | int, ...] = ()
GROUP_AT, PEER_AT, CALL_AT = ("groups", 0), ("peers", 1), ("groups", 0, "last")
HOSTILE: Sequence[tuple[tuple[str | int, ...], dict[str, Any]]] = [
    (PEER_AT, {"link": -4}),
    (PEER_AT, {"link": 1 << 40}),
    (PEER_AT, {"silence": -5}),
    (PEER_AT, {"silence": 256}),
    (PEER_AT, {"state": -1}),
    (PEER_AT, {"state": 256}),
    (PEER_AT, {"rank": -1}),
    (PEER_AT, {"packets_missing": 1, "packets_received": -1}),
    (PEER_AT, {"packets_missing": -1}),
    (PEER_AT, {"packets_sent": -1}),
    (PEER_AT, {"rate": 1e300}),
    (PEER_AT, {"rtt": float("inf")}),
    (ROOT, {"stats": {"packets_missing": 1, "packets_received": -1}}),
    (ROOT, {"pid": -1}),
    (ROOT, {"rank": -1}),
    (GROUP_AT, {"members": [0, 1, 2, WORLD]}),
    (GROUP_AT, {"members": [0, 1, 2, -9]}),
    (GROUP_AT, {"members": []}),
    (GROUP_AT, {"rank": WORLD}),
    (GROUP_AT, {"rank": -1}),
    (GROUP_AT, {"absent": [WORLD]}),
    (GROUP_AT, {"absent": [-1]}),
    (GROUP_AT, {"number": -1}),
    (GROUP_AT, {"submitted": -1}),
    (GROUP_AT, {"pending": -1}),
    (GROUP_AT, {"failed": 1 << 31}),
    (CALL_AT, {"op": -1}),
    (CALL_AT, {"seq": -2}),
    (CALL_AT, {"peer": -2}),
    (CALL_AT, {"bytes": -1}),
    (CALL_AT, {"began": 1e300}),
]


@pytest.mark.parametrize(("at", "changes"), HOSTILE)
def test_a_stranger_s_record_with_a_number_out_of_range_is_refused(
    at: tuple[str | int, ...], changes: dict[str, Any]
) -> None:
    said = json.loads(json.dumps(record(0, 7).to_json()))
    assert Record.from_json(said) == record(0, 7)
    part = said
    for key in at:
        part = part[key]
    assert changes.keys() <= part.keys()
    part |= changes
    with pytest.raises(ValueError, match=r"wanted a |fit together"):
        Record.from_json(said)


def test_the_largest_numbers_of_a_record_can_be_told() -> None:
    most = {"link": 255, "silence": 255, "state": 255, "rank": (1 << 64) - 1, "rtt": 1e18}
    told = with_peer(with_group(record(0, 7), rank=3, failed=-9), 1, **most)
    told = Record.from_json(json.loads(json.dumps(told.to_json())))
    assert job_of("ab", [told])["ranks"][0]["link"][0]["by"] == "other"


def test_who_was_given_up_without_proof() -> None:
    lost = with_peer(with_peer(record(0, 7), 1, state=RankState.LOST), 2, state=RankState.ENDED)
    assert given_up([lost]) == {1}
    assert given_up([lost, record(1, 7, state=status_page.DEAD)]) == set()
    assert given_up([]) == set()


def test_a_message_waits_for_its_peer() -> None:
    message = CallRecord(1, -1, "recv", 8, 3, 1.0, -1.0, False)
    receives = with_group(record(0, 7, waits=False), messages=(message,))
    assert waits_for(receives, record(1, 7, waits=False))[0] == [3]
    from_any = with_group(receives, messages=(replace(message, peer=-1),))
    left = with_peer(from_any, 2, state=RankState.LEFT)
    assert waits_for(left)[0] == [1, 3]


def test_states_are_by_the_kernel_then_by_what_others_know() -> None:
    here = record(0, 7)
    assert states(here, record(1, 7, state=status_page.DEAD))[:2] == ["alive", "dead"]
    assert states(with_peer(here, 1, state=RankState.ENDED))[1] == "dead"
    assert states(with_peer(here, 1, state=RankState.LOST))[1] == "dead"
    assert states(with_peer(here, 1, state=RankState.LEFT))[1] == "left"
    assert states(with_peer(here, 1, heard=0.1))[1] == "alive"
    assert states(with_peer(here, 1, heard=3.0))[1] == "silent"
    assert states(with_peer(here, 1, heard=-1.0))[1] == "silent"
    far = record(1, 7, state=status_page.ELSEWHERE)
    assert states(here, far)[1] == "alive"
    assert states(with_peer(here, 1, state=RankState.LOST), far)[1] == "dead"
    # The word of a process that doesn't run is no news of others, and its silence tells nothing.
    for halted in (status_page.DEAD, status_page.STOPPED):
        gone = with_peer(record(0, 7, state=halted), 1, heard=0.1)
        assert states(gone)[1:] == ["unknown"] * 3
        hears = with_peer(record(3, 7), 1, heard=3.0)
        assert states(gone, hears)[1:] == ["silent", "alive", "alive"]
    stopped = with_peer(record(0, 7, state=status_page.STOPPED), 1, state=RankState.ENDED)
    assert states(stopped)[1] == "dead"


def test_a_process_that_has_ended_and_its_heir_are_one_rank() -> None:
    (job,) = jobs_of([record(0, 7, state=status_page.DEAD), replace(record(0, 8), pid=7)])
    assert (job["ranks"][0]["pid"], job["ranks"][0]["state"]) == (7, "alive")


def test_figures_are_told_by_rank_and_link() -> None:
    rank = job_of("ab", [record(0, 7)])["ranks"][0]
    assert (rank["missing"], rank["recovered"], rank["step_seconds"]) == (0.25, 2, 0.25)
    assert (rank["call"], rank["call_number"], rank["call_seconds"]) == ("all_reduce", 106, 2.0)
    link = rank["link"][0]
    assert (link["rank"], link["by"], link["loss"], link["missing"]) == (1, "udp", 0.2, 0.1)
    told = job_of("ab", [record(0, 7)])["ranks"][1]
    assert (told["tells"], told["call"], told["heard_seconds"]) == (False, None, 0.5)


def test_there_may_be_no_records_at_all() -> None:
    assert jobs_of([]) == []
    assert job_of("ab", []) == {"session": "ab", "world": 0, "ranks": []}


def _documented(of: str) -> set[str]:
    """The fields that the page's table has."""
    table = PAGE.read_text(encoding="utf-8").partition(f"| field of a {of} | meaning |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_all_fields_are_on_the_page_and_no_others() -> None:
    job = job_of("ab", [record(0, 7), record(1, 6, waits=False)])
    rank = job["ranks"][0]
    assert _documented("job") == job.keys()
    assert _documented("rank") == rank.keys() | {"stacks", "no_stacks"}
    assert _documented("link") == rank["link"][0].keys()
    for entry in job["ranks"]:  # those that tell nothing have all of them too
        assert entry.keys() == rank.keys()
    text = PAGE.read_text(encoding="utf-8")
    for name in (*rank["groups"][0], *job["ranks"][1]["last_call"]):
        assert f"`{name}`" in text


def test_a_rank_that_can_not_be_looked_up_is_silent_when_its_engine_is() -> None:
    """One in a container, say. Others may still know better."""
    old = replace(record(1, 7, state=status_page.ELSEWHERE), written=61.0)
    assert states(record(0, 7), replace(old, written=59.0))[1] == "alive"
    assert states(record(0, 7), old)[1] == "silent"
    knows = with_peer(record(0, 7), 1, state=RankState.LOST)
    assert states(knows, old)[1] == "dead"

"""Deadlines from arrivals: a pause and a longer way are waited for; and how that is judged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.common.results import Result
from benchmarks.studies.deadlines import hindsight, report
from benchmarks.studies.deadlines.hindsight import Stream
from benchmarks.studies.deadlines.rank import STREAM
from benchmarks.studies.deadlines.scenarios import BY_NAME, Change, Scenario, Trial
from benchmarks.studies.deadlines.study import run
from benchmarks.studies.deadlines.summary import Operation, figures, operations, summary
from lossycoll.lab import Link, Network, Port
from tests.support.lab_kit import needs_lab
from tests.support.stalls import Stalls

LOSS = 0.01
LONG_MS = 100.0
PATH = Network(
    hosts=2,
    link=Link(loss=LOSS, delay_ms=5),
    port=Port(up_mbit=20, down_mbit=20, queue_ms=50),
)


def measured(changes: tuple[Change, ...], count: int) -> tuple[list[Operation], dict[str, Any]]:
    record = run(Scenario("", "", PATH, mib=0.5, operations=count, changes=changes))
    found = operations(record["ranks"])
    network = record["network"]
    lost = sum(one.lost for one in found)
    assert lost > 0.3 * LOSS * sum(one.packets for one in found), "the network lost nothing"
    # The network drops more than data.
    assert lost <= network["lost"] + network["queues"] + network["unasked"]
    return found, record


STARVED = 0.25
"""Seconds that a thread which only sleeps is late where a machine is out of processors. A deadline
is a second at least, and a rank has several threads to wait for in turn."""


class NotHit(AssertionError):
    """The fault met nothing that it was to disturb, so the attempt shows nothing."""


def hold(attempt: Callable[[], None], attempts: int = 3) -> None:
    """Asserts that ``attempt`` holds.

    A machine may starve a rank, or the network, for as long as a deadline, which is then right to
    end a stream. So an attempt that fails counts unless the machine starved this process too, or
    the fault came at the wrong time.
    """
    for left in reversed(range(attempts)):
        with Stalls() as stalls:
            try:
                attempt()
                break
            except AssertionError as error:
                counts = stalls.longest < STARVED and not isinstance(error, NotHit)
                if counts or not left:
                    raise
                print(f"once more: this process stood still for {stalls.longest:.2f} s; {error}")


@pytest.mark.serial
@needs_lab
@pytest.mark.parametrize("pauses", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_is_stopped_amid_a_stream_loses_nothing(pauses: int) -> None:
    hold(partial(stopped_amid_a_stream, pauses))


def stopped_amid_a_stream(pauses: int) -> None:
    """For longer than any deadline that was learnt: 1 s, their floor."""
    pause = 1.5
    changes = tuple(Change(4 * (i + 1), pause=pause, after=0.06) for i in range(pauses))
    found, _ = measured(changes, 4 * (pauses + 1))
    silences = [stream.gap for one in found for stream in one.streams]
    if max(silences) <= 0.9 * pause:
        raise NotHit("no stream was under way when the rank was stopped")
    assert sum(one.given_up for one in found) == 0
    assert sum(one.deadline_hits for one in found) == 0


@pytest.mark.long
@pytest.mark.serial
@needs_lab
def test_a_way_that_grows_longer_is_waited_for() -> None:
    hold(grows_longer)


def grows_longer() -> None:
    """What was learnt on the short one must not end what is slower at first on the long one."""
    longer, back = Change(10, link={"delay_ms": LONG_MS}), Change(20, link={"delay_ms": 5})
    found, record = measured((longer, back), 26)
    start = min(rank[0]["began"] for rank in record["ranks"])
    times = [when - start for when in record["changed"]]
    amid = [one for one in found if times[0] < one.began < times[1]]
    # A way for each phase at least; before, an operation took less.
    assert min(one.seconds for one in amid) > 2 * LONG_MS / 1e3
    assert sum(one.deadline_hits for one in found) == 0
    assert sum(one.given_up for one in found if one.began + one.seconds < times[1]) == 0
    # When the way shortens, the end of a stream overtakes the packets that were under way.
    assert sum(one.given_up for one in found) <= 0.02 * sum(one.packets for one in found)


# ---- hindsight, on streams that are made up ----

EVEN = Stream(packets=11, arrived=11, took=1.0, gap=0.1, ended=1.0)
SHORT = Stream(packets=10, arrived=9, took=0.4, gap=0.0, ended=0.5)
PAUSED = Stream(packets=11, arrived=11, took=6.0, gap=5.0, ended=6.0)


def test_a_fixed_deadline_waits_for_what_is_lost() -> None:
    assert [EVEN.waited(d) for d in (0.5, 2.0)] == [0.5, 1.0]
    assert [SHORT.waited(d) for d in (0.2, 2.0)] == [0.2, 2.0]
    assert (SHORT.complete, EVEN.complete) == (False, True)


def test_a_fixed_deadline_gives_up_what_comes_later() -> None:
    assert EVEN.given_up(1.0) == 0
    assert EVEN.given_up(0.0) == 10  # the first packet is there
    assert 4 < EVEN.given_up(0.5) < 6
    # Half of the packets come before the silence of 5 s, half after it.
    assert [PAUSED.given_up(d) for d in (0.0, 0.5, 3.0, 5.5, 6.0)] == [10, 5, 5, 5, 0]
    late = Stream(packets=10, arrived=9, took=0.4, gap=0.0, ended=0.5, late=1)
    assert [late.given_up(d) for d in (0.45, 0.5)] == [1, 0]


def test_the_best_fixed_deadline_is_the_shortest_that_gives_up_no_more() -> None:
    streams = [EVEN, SHORT, SHORT]
    found = hindsight.best(streams, 0)
    assert (found.deadline, found.given_up, found.waited) == (1.0, 0, 3.0)
    assert hindsight.learnt(streams) == hindsight.Outcome(0.0, 0.0, 2.0)
    # One long pause, and every stream that lacks something waits as long.
    assert hindsight.best([*streams, PAUSED], 0).waited == pytest.approx(6 + 1 + 2 * 6)
    assert hindsight.best([*streams, PAUSED], 6).deadline < 6
    half = hindsight.as_long(streams, 3 * 0.5)
    assert (half.deadline, half.waited) == (pytest.approx(0.5), pytest.approx(1.5))
    assert half.given_up == EVEN.given_up(half.deadline)
    with pytest.raises(ValueError, match="no streams"):
        hindsight.best([], 0)


def seen(sent: int, received: int, missing: int, late: int, cause: str) -> dict[str, Any]:
    """One operation at one of two ranks, whose stream has 10 packets and begins after 0.1 s."""
    stream = dict(zip(STREAM, (10, received, 0.1, 0.3, 0.05, 0.4, cause), strict=True))
    return {
        "began": 5.0,
        "seconds": 0.5,
        "sent": sent,
        "received": received,
        "missing": missing,
        "late": late,
        "deadline_hits": int(cause == "DEADLINE"),
        "streams": [stream],
    }


def test_packets_are_lost_late_or_never_sent() -> None:
    record = {
        "ranks": [[seen(7, 9, 1, 0, "LOSS")], [seen(10, 5, 5, 1, "DEADLINE")]],
        "changed": [5.2],
        "network": {},
    }
    (one,) = operations(record["ranks"])
    assert (one.packets, one.missing, one.late, one.unsent, one.lost) == (20, 6, 1, 3, 2)
    assert one.given_up == 4
    # What came late, or not at all, belongs to the stream that was given up.
    assert [stream.late for stream in one.streams] == [0, 4]
    judged = summary(record, ())
    assert judged["learnt"]["given_up"] == 4
    assert judged["fixed_before"] is None
    kept = figures(record, [change.at for change in BY_NAME["pause"].changes])
    assert kept["changed"] == [0.2]
    assert [Stream(*row).late for row in kept["streams"]] == [0, 4]
    assert kept["streams"][0] == [10, 9, 0.2, 0.05, 0.3, 0]
    assert "4 | 300 | " in report.table([Result(Trial("pause").settings, kept)])


def test_records_that_make_no_sense_are_refused() -> None:
    one = seen(10, 9, 1, 0, "LOSS")
    with pytest.raises(ValueError, match="not alike many"):
        operations([[one], [one, one]])
    with pytest.raises(ValueError, match="22 packets were sent, 20 expected"):
        operations([[seen(12, 9, 1, 0, "LOSS")], [one]])

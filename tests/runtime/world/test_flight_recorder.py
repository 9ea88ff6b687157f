"""What torch's flight recorder makes of calls: all kinds agree, and what differs is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lossycoll.runtime.engine.status_record import CallRecord, Record
from lossycoll.runtime.world import flight_recorder
from tests.runtime.world.test_job_status import record

WORLD = 4
CALLS = (
    ("all_reduce float32[8] SUM (lossy)", 32),
    ("all_gather float32[8]", 128),
    ("reduce_scatter float32[32] SUM", 32),  # of one input
    ("reduce_scatter float32[8] SUM", 32),  # of a list
    ("reduce_scatter bfloat16[32] SUM (lossy)", 16),
    ("broadcast float32[8] from 0", 32),
    ("reduce float32[8] SUM to 1", 32),
    ("scatter float32[8] from 0", 32),
    ("gather float32[8] to 0", 128),
    ("all_to_all float32[8]", 32),
    ("all_gather_blocks float32[32]", 128),
    ("reduce_scatter_blocks float32[32]", 32),
    ("monitored_barrier uint8[1]", 1),
    ("barrier", 1),
)


def with_calls(process: int, calls: tuple[tuple[str, int], ...], first: int = 1) -> Record:
    """A process that has made calls, and waits in the last one."""
    made = tuple(
        CallRecord(
            op=op, seq=op, text=text, bytes=size, peer=-1, failed=False,
            began=100.0 - op, ended=99.5 - op if op < len(CALLS) else -1.0,
        )
        for op, (text, size) in enumerate(calls, 1)
        if op >= first
    )  # fmt: skip
    of = record(process, len(calls))
    return replace(of, groups=(replace(of.groups[0], calls=made),))


def read(records: list[Record]) -> Any:
    """torch's database."""
    pytest.importorskip("torch.distributed.flight_recorder")
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    options: Any = JobConfig().parse_args([])
    dumps = flight_recorder.dumps(records)
    details: Any = {str(rank): {"rank": rank, **dump} for rank, dump in dumps.items()}
    return build_db(details, options, flight_recorder.VERSION)


def test_all_kinds_of_calls_agree() -> None:
    found = read([with_calls(process, CALLS) for process in range(WORLD)]).collectives
    assert len(found) == len(CALLS)
    assert [one.collective_name for one in found if not one.pass_check] == []
    assert [one.collective_seq_id for one in found] == list(range(1, len(CALLS) + 1))
    assert (found[0].collective_state, found[-1].collective_state) == ("completed", "scheduled")


def test_what_one_rank_has_forgotten_is_no_call_that_it_has_not_made() -> None:
    records = [with_calls(process, CALLS, first=process + 1) for process in range(WORLD)]
    found = read(records).collectives
    assert [one.collective_seq_id for one in found] == list(range(WORLD, len(CALLS) + 1))
    assert all(one.pass_check for one in found)


def test_a_call_that_differs_is_named() -> None:
    other = (("all_reduce float32[9] SUM (lossy)", 36), *CALLS[1:])
    records = [with_calls(process, other if process == 2 else CALLS) for process in range(WORLD)]
    first = read(records).collectives[0]
    assert not first.pass_check
    assert set(first.mismatch_collectives) == {2}


def test_a_message_that_waits_is_told() -> None:
    message = CallRecord(1, -1, "recv", 8, 3, 1.0, -1.0, False)
    of = record(0, 1)
    dumps = flight_recorder.dumps(
        [replace(of, groups=(replace(of.groups[0], messages=(message,)),))]
    )
    (entry,) = dumps[0]["entries"]
    assert (entry["profiling_name"], entry["is_p2p"]) == ("gloo:recv 0<-3", True)
    assert entry["state"] == "scheduled"


def test_several_operations_of_one_call_are_one_entry() -> None:
    parts = tuple(
        CallRecord(op, 5, "all_reduce float32[8] SUM", 32, -1, 3.0, ended, False)
        for op, ended in ((1, 1.0), (2, -1.0))
    )
    of = record(0, 2)
    dumps = flight_recorder.dumps([replace(of, groups=(replace(of.groups[0], calls=parts),))])
    (entry,) = dumps[0]["entries"]
    assert (entry["collective_seq_id"], entry["state"]) == (5, "scheduled")

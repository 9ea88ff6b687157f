"""From what ranks saw to streams, and to the figures of a scenario. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import hindsight
from .hindsight import Stream


@dataclass(frozen=True)
class Operation:
    """One operation over all ranks. ``began``: seconds since the first one. ``seconds``: of the
    slowest rank. ``given_up``: packets that the network had not lost, because they came ``late``
    or were not sent any more."""

    began: float
    seconds: float
    packets: int
    missing: int
    lost: int
    late: int
    unsent: int
    deadline_hits: int
    streams: tuple[Stream, ...]

    @property
    def given_up(self) -> int:
        return self.late + self.unsent


def operations(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[Operation]:
    """``ranks``: what each wrote (rank.py). Raises ValueError where packets are unaccounted for."""
    if len({len(rank) for rank in ranks}) != 1 or not ranks[0]:
        raise ValueError(f"ranks saw {[len(rank) for rank in ranks]} operations, not alike many")
    start = min(rank[0]["began"] for rank in ranks)
    found = []
    for seen in zip(*ranks, strict=True):
        packets = sum(one["received"] + one["missing"] for one in seen)
        sent = sum(one["sent"] for one in seen)
        late = sum(one["late"] for one in seen)
        received = sum(one["received"] for one in seen)
        unsent = packets - sent
        if unsent < 0:
            raise ValueError(f"{sent} packets were sent, {packets} expected: something was resent")
        streams = [_streams(one) for one in seen]
        found.append(
            Operation(
                began=min(one["began"] for one in seen) - start,
                seconds=max(one["seconds"] for one in seen),
                packets=packets,
                missing=packets - received,
                lost=sent - received - late,
                late=late,
                unsent=unsent,
                deadline_hits=sum(one["deadline_hits"] for one in seen),
                streams=_with_unsent([stream for some in streams for stream in some], unsent),
            )
        )
    return found


def _streams(seen: Mapping[str, Any]) -> list[tuple[Stream, str]]:
    """A rank's streams and why they ended. What came late belongs to the one that lacked most."""
    rows = seen["streams"]
    most = max(rows, key=lambda row: row["packets"] - row["arrived"], default=None)
    return [
        (
            Stream(
                packets=row["packets"],
                arrived=row["arrived"],
                took=max(0.0, row["last"] - row["first"]),
                gap=row["gap"],
                ended=row["end"] - row["first"],
                late=seen["late"] if row is most else 0,
            ),
            row["cause"],
        )
        for row in rows
    ]


def _with_unsent(streams: Sequence[tuple[Stream, str]], unsent: int) -> tuple[Stream, ...]:
    """A sender stops where its receiver has given up: by a deadline, and most likely where most is
    missing."""
    given_up = [stream for stream, cause in streams if cause == "DEADLINE"]
    most = max(given_up, key=lambda stream: stream.packets - stream.arrived, default=None)
    return tuple(
        Stream(**{**asdict(stream), "late": stream.late + unsent}) if stream is most else stream
        for stream, _ in streams
    )


def summary(record: Mapping[str, Any], changes: Sequence[int]) -> dict[str, Any]:
    """The figures of a scenario. ``changes``: the operations at which something changed."""
    found = operations(record["ranks"])
    streams = [stream for operation in found for stream in operation.streams]
    ours = hindsight.learnt(streams)
    before = [
        stream for operation in found[: min(changes, default=0)] for stream in operation.streams
    ]
    out = {
        "operations": len(found),
        "streams": len(streams),
        "packets": sum(operation.packets for operation in found),
        "missing": sum(operation.missing for operation in found),
        "lost": sum(operation.lost for operation in found),
        "deadline_hits": sum(operation.deadline_hits for operation in found),
        "learnt": asdict(ours),
        "fixed": asdict(hindsight.best(streams, ours.given_up)),
        "fixed_as_long": asdict(hindsight.as_long(streams, ours.waited)),
        "fixed_before": None,
    }
    if before:
        deadline = hindsight.best(before, 0).deadline
        out["fixed_before"] = asdict(hindsight.fixed(streams, deadline))
    return out


def figures(record: Mapping[str, Any], changes: Sequence[int]) -> dict[str, Any]:
    """What is kept of a run: enough to judge any deadline again. ``changes``: as of summary."""
    found = operations(record["ranks"])
    start = min(rank[0]["began"] for rank in record["ranks"])
    return {
        "network": record["network"],
        "changed": [round(when - start, 3) for when in record["changed"]],
        "summary": summary(record, changes),
        "operations": [
            [round(one.began, 4), round(one.seconds, 4), one.missing, one.given_up] for one in found
        ],
        "streams": [
            [
                one.packets,
                one.arrived,
                *(round(t, 5) for t in (one.took, one.gap, one.ended)),
                one.late,
            ]
            for operation in found
            for one in operation.streams
        ],
    }

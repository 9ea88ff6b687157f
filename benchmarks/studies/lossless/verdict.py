"""The goals, and where they are missed, in words made from the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.results import Result
from lossycoll.cli.argtypes import human

from .cells import (
    GOAL_CPU,
    GOAL_MEMORY,
    GOAL_RAW,
    GOAL_SMALL,
    GOAL_TWO,
    MIB,
    RAW_BASE,
    RAW_SIZES,
    bus_factor,
    goal,
)

Row = dict[str, Any]


def bus(entry: Result, row: Row, variant: str, share: str = "p50") -> float:
    """GB/s of the median call, or of the one that this share of all is faster than."""
    factor = bus_factor(row["collective"], entry.settings["ranks"])
    return float(1e-9 * factor * row["bytes"] / row["variants"][variant][share])


def cpu_per_gb(entry: Result, row: Row, variant: str) -> float:
    """CPU seconds of a rank for each GB that it has to send and to receive."""
    factor = bus_factor(row["collective"], entry.settings["ranks"])
    return float(row["variants"][variant]["cpu"] / (1e-9 * factor * row["bytes"]))


def raw_share(entry: Result, size: int) -> float:
    """All-reduce's bytes per second against those of bare sockets on the same wire."""
    row = next(row for row in entry.figures["rows"] if row["bytes"] == size)
    return bus(entry, row, "lossy") / float(entry.figures["raw"][RAW_BASE]["gb_per_s"])


NAMED = 4
"""Places that a sentence names at most."""
Found = tuple[str, float, float]
"""What it is of, what was reached and what was wanted."""


def lines(entries: Sequence[Result]) -> list[str]:
    """One sentence per goal, with the places where it is missed if they are few, and one on where
    gloo is ahead."""
    rows = [
        (entry, row)
        for entry in entries
        if entry.settings["part"] == "collectives"
        for row in entry.figures["rows"]
    ]
    out = []
    for collective in ("all_reduce", "broadcast", "all_gather"):
        own = [(entry, row) for entry, row in rows if row["collective"] == collective]
        large = [(_name(e, row), _speed(row), _goal(e, row)) for e, row in own if _goal(e, row)]
        small = [
            (f"{_name(e, row)} {share}", _ratio(row, share), GOAL_SMALL)
            for e, row in own
            if row["bytes"] < MIB
            for share in ("p50", "p99")
        ]
        cpu = [(_name(e, row), _ratio(row, "cpu"), GOAL_CPU) for e, row in own]
        out += _said(f"{collective}: times gloo's bus bandwidth", large, at_least=True)
        out += _said(f"{collective}, 4 KiB: time against gloo's", small, at_least=False)
        out += _said(f"{collective}: CPU time against gloo's", cpu, at_least=False)
        behind = [(name, speed, 1.0) for name, speed, _ in large if speed < 1]
        behind += [(name, 1 / ratio, 1.0) for name, ratio, _ in small if ratio > 1]
        if own:
            places = "; ".join(f"{name} ({speed:.2f}x)" for name, speed, _ in behind)
            out.append(f"{collective}: slower than gloo: {places or 'nowhere'}.")
    out += _said("Share of bare sockets", _raw(entries), at_least=True) + _bound(entries)
    out += _said("Memory beyond the tensors, in buckets", _memory(entries), at_least=False)
    wrong = [_name(e, row) for e, row in rows if not _right(row)]
    missing = sum(entry.figures.get("missing", 0) for entry in entries)
    if rows:
        out.append(
            f"Results that were wrong: {'; '.join(wrong) or 'none'}. Packets missing: {missing}."
        )
    return out


def _said(what: str, found: Sequence[Found], *, at_least: bool) -> list[str]:
    if not found:
        return []
    reaches: Callable[[Found], bool] = (
        (lambda f: f[1] >= f[2]) if at_least else (lambda f: f[1] <= f[2])
    )
    missed = [one for one in found if not reaches(one)]
    values = sorted(value for _, value, _ in found)
    wanted = sorted({want for _, _, want in found})
    goals = " or ".join(f"{want:g}" for want in wanted)
    text = f"{what}: {values[0]:.2f} to {values[-1]:.2f}, goal {'>=' if at_least else '<='} {goals}"
    text += f", reached in {len(found) - len(missed)} of {len(found)}"
    if 0 < len(missed) <= NAMED:  # else the tables tell
        text += "; not in " + "; ".join(f"{name} ({value:.2f})" for name, value, _ in missed)
    return [text + "."]


def _name(entry: Result, row: Row) -> str:
    job = entry.settings
    return f"{job['wire']}, {job['ranks']} ranks, {human(row['bytes'])}"


def _right(row: Row) -> bool:
    return all(variant["right"] for variant in row["variants"].values())


def _goal(entry: Result, row: Row) -> float:
    return goal(row["collective"], entry.settings["ranks"], row["bytes"]) or 0.0


def _speed(row: Row) -> float:
    return 1 / _ratio(row, "p50")


def _ratio(row: Row, figure: str) -> float:
    """Lossy's figure over gloo's."""
    return float(row["variants"]["lossy"][figure] / row["variants"]["gloo"][figure])


def _raw(entries: Sequence[Result]) -> list[Found]:
    return [
        (f"{entry.settings['wire']}, {human(size)}", raw_share(entry, size), GOAL_RAW)
        for entry in entries
        if entry.settings["part"] == "raw"
        for size in RAW_SIZES
    ]


def _bound(entries: Sequence[Result]) -> list[str]:
    """What the goal against gloo would take, beside what sockets carry at all."""
    jobs = {(e.settings["part"], e.settings["wire"], e.settings["ranks"]): e for e in entries}
    out = []
    for (part, wire, ranks), entry in jobs.items():
        raw = jobs.get(("raw", wire, ranks))
        if part != "collectives" or raw is None:
            continue
        row = max(
            (row for row in entry.figures["rows"] if row["collective"] == "all_reduce"),
            key=lambda row: bus(entry, row, "gloo"),
        )
        gloo, rate = bus(entry, row, "gloo"), raw.figures["raw"][RAW_BASE]["gb_per_s"]
        out.append(
            f"On {wire} gloo's best bus bandwidth with {ranks} ranks is {gloo:.2f} GB/s, and bare "
            f"sockets carry {rate:.2f}: {rate / gloo:.1f} times that, where the goal is "
            f"{GOAL_TWO:g} times."
        )
    return out


def _memory(entries: Sequence[Result]) -> list[Found]:
    return [
        (f"bucket of {human(int(size))}", peak / int(size), GOAL_MEMORY)
        for entry in entries
        if entry.settings["part"] == "memory"
        for rank in entry.figures["ranks"]
        for size, peak in rank["lossy"]["peaks"].items()
    ]

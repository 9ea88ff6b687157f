"""deadlines.json, the picture, and the table between the marks of deadlines.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogFormatter

from benchmarks.common.report import fill, markdown, plt, save
from benchmarks.common.results import Result

from . import hindsight
from .hindsight import Stream
from .scenarios import SCENARIOS

FILE = "deadlines.json"
DEADLINES = 60
"""Points of a curve."""


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the table."""
    by_name = {one.settings["scenario"]: one for one in entries}
    ordered = [by_name[one.name] for one in SCENARIOS if one.name in by_name]
    lines = ",\n".join(json.dumps(asdict(one)) for one in ordered)
    (folder / FILE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    fill(folder / "deadlines.md", {"deadlines": table(ordered)})
    draw(ordered, folder / "deadlines.png")
    return table(ordered)


def table(entries: Sequence[Result]) -> str:
    head = ["run", "operations, streams", "packets", "lost by the network", "deadlines hit"]
    head += [
        "given up beyond that",
        "waited, ms a stream",
        "best fixed",
        "it waits",
        "against ours",
    ]
    head += ["fixed, that waits as long as ours", "fixed, as was best before"]
    titles = {one.name: one.title for one in SCENARIOS}
    rows = []
    for one in entries:
        s = one.figures["summary"]
        ours, fixed, before = s["learnt"], s["fixed"], s["fixed_before"]
        each = 1e3 / s["streams"]
        rows.append(
            [
                titles[one.settings["scenario"]],
                f"{s['operations']}, {s['streams']}",
                f"{s['packets']:,}",
                f"{s['lost'] / s['packets']:.2%}",
                str(s["deadline_hits"]),
                f"{ours['given_up']:.0f}",
                f"{ours['waited'] * each:.0f}",
                f"{1e3 * fixed['deadline']:.0f} ms",
                f"{fixed['waited'] * each:.0f} ms",
                f"{fixed['waited'] / ours['waited']:.1f}x",
                _gives_up(s["fixed_as_long"], s["packets"]),
                "-" if before is None else _gives_up(before, s["packets"]),
            ]
        )
    return markdown(head, rows)


def _gives_up(fixed: Mapping[str, float], packets: int) -> str:
    return f"{1e3 * fixed['deadline']:.0f} ms: gives up {fixed['given_up'] / packets:.1%}"


def draw(entries: Sequence[Result], path: Path) -> None:
    """Above, each operation over time; below, what any fixed deadline gives up against its wait."""
    if not entries:
        return
    size = (4.4 * len(entries), 6.4)
    figure, axes = plt.subplots(2, len(entries), figsize=size, layout="constrained", squeeze=False)
    titles = {one.name: one.title for one in SCENARIOS}
    for column, one in enumerate(entries):
        _over_time(axes[0][column], one)
        _of_deadlines(axes[1][column], one)
        axes[0][column].set_title(titles[one.settings["scenario"]], fontsize=9)
    axes[0][0].set_ylabel("operation, ms")
    axes[1][0].set_ylabel("given up though not lost, % of packets")
    figure.legend(
        handles=[*axes[0][0].get_lines()[:3], *axes[1][0].get_lines()],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
    )
    save(figure, path, dpi=100)


def _over_time(axis: Any, one: Result) -> None:
    columns = zip(*one.figures["operations"], strict=True)
    began, seconds, _, given_up = (np.array(column) for column in columns)
    axis.plot(began, 1e3 * seconds, ".", color="tab:blue", label="operation")
    fixed = one.figures["summary"]["fixed"]["deadline"]
    axis.axhline(1e3 * fixed, color="grey", linestyle="--", label="best fixed deadline of a stream")
    hit = given_up > 0
    axis.plot(began[hit], 1e3 * seconds[hit], "rx", label="gave up what was not lost")
    for when in one.figures["changed"]:
        axis.axvline(when, color="tab:orange", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_ylim(1e3 * seconds.min() / 2, 2e3 * seconds.max())
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    axis.set_xlabel("seconds")


def _of_deadlines(axis: Any, one: Result) -> None:
    streams = [Stream(*row) for row in one.figures["streams"]]
    longest = max(stream.ended for stream in streams)
    found = [hindsight.fixed(streams, d) for d in longest * np.geomspace(1e-3, 1, DEADLINES)]
    packets, each = one.figures["summary"]["packets"], 1e3 / len(streams)
    axis.plot(
        [outcome.waited * each for outcome in found],
        [100 * outcome.given_up / packets for outcome in found],
        color="grey",
        label="fixed deadlines",
    )
    ours = hindsight.learnt(streams)
    at = (ours.waited * each, 100 * ours.given_up / packets)
    axis.plot(*at, "o", color="tab:blue", label="learnt")
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_ylim(bottom=-0.002)
    axis.set_xlabel("waited, ms a stream")

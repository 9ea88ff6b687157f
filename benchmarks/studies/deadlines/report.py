"""deadlines.json, the picture, and the table between the marks of deadlines.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogFormatter

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result
from benchmarks.common.tables import fill, markdown

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
    """Each operation over time, a panel for each scenario."""
    if not entries:
        return
    rows = -(-len(entries) // 2)
    size = (10, 3.4 * rows)
    figure, axes = plt.subplots(rows, 2, figsize=size, layout="constrained", squeeze=False)
    titles = {one.name: one.title for one in SCENARIOS}
    for axis in axes.flat[len(entries) :]:
        axis.set_visible(False)
    for axis, one in zip(axes.flat, entries, strict=False):
        _over_time(axis, one)
        axis.set_title(titles[one.settings["scenario"]], fontsize=10)
        axis.set_ylabel("operation, ms")
    handles = axes[0][0].get_lines()[:4]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
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
        axis.axvline(when, color="tab:orange", linewidth=0.8, label="change or pause")
    axis.set_yscale("log")
    axis.set_ylim(1e3 * seconds.min() / 2, 2e3 * seconds.max())
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    axis.set_xlabel("seconds")

"""few_bytes.json, the picture, and what stands between the marks of moshpit.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result, one_budget
from benchmarks.common.tables import markdown, publish

from .runs import GOAL_EVERY, REFERENCE, VARIANTS, Run

NAME: Final = "few_bytes"
NEAR: Final = 0.01
"""The goal: a loss within so much of the reference's,"""
FEWER: Final = 50.0
"""and so many times fewer bytes."""


def results(entries: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each variant and number of local steps, with lists by seed, and against the
    reference of the same seed at the goal's steps. Raises ValueError for figures that make no
    sense, for runs of more than one budget, and where that reference is missing."""
    one_budget(entries)
    found = {}
    for one in entries:
        run, figures = Run.of(one.settings), one.figures
        if not (math.isfinite(figures["loss"]) and figures["loss"] > 0 and figures["bytes"] > 0):
            raise ValueError(f"{run.key}: a loss of {figures['loss']}, {figures['bytes']} bytes")
        found[run.variant, run.every, run.seed] = figures
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    names = list(VARIANTS)
    for (variant, every, seed), figures in sorted(found.items(), key=lambda item: item[0][2]):
        if (REFERENCE, GOAL_EVERY, seed) not in found:
            raise ValueError(f"seed {seed} has no {REFERENCE} of {GOAL_EVERY} steps")
        reference = found[REFERENCE, GOAL_EVERY, seed]
        row = rows.setdefault((every, names.index(variant)), {"variant": variant, "every": every})
        for name, value in {
            "seed": seed,
            "loss": figures["loss"],
            "bytes": figures["bytes"],
            "apart": figures["apart"],
            "curve": figures["curve"],
            "above": figures["loss"] / reference["loss"] - 1,
            "fewer": reference["bytes"] / figures["bytes"],
            "above_alike": _above(figures, found.get((REFERENCE, every, seed))),
        }.items():
            row.setdefault(name, []).append(value)
    return [rows[place] for place in sorted(rows)]


def _above(figures: Mapping[str, Any], plain: Mapping[str, Any] | None) -> float | None:
    """The loss against the reference's of as many local steps; None where there is none."""
    return None if plain is None else float(figures["loss"] / plain["loss"] - 1)


def _mean(shares: Sequence[float]) -> str:
    """In percent, with the least and the most."""
    percent = [100 * one for one in shares]
    spread = f" ({min(percent):+.2f}, {max(percent):+.2f})" if len(percent) > 1 else ""
    return f"{statistics.fmean(percent):+.2f}%{spread}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row."""
    lines = []
    for row in rows:
        alike = [one for one in row["above_alike"] if one is not None]
        is_reference = row["variant"] == REFERENCE and row["every"] == GOAL_EVERY
        lines.append(
            [
                row["variant"],
                str(row["every"]),
                ", ".join(map(str, row["seed"])),
                f"{statistics.fmean(row['bytes']) / 2**20:.1f}",
                "-" if is_reference else f"{statistics.fmean(row['fewer']):.1f}",
                f"{statistics.fmean(row['loss']):.4f}",
                "-" if is_reference else _mean(row["above"]),
                "-" if row["variant"] == REFERENCE or not alike else _mean(alike),
            ]
        )
    reference = f"{REFERENCE}, {GOAL_EVERY}"
    head = ["variant", "local steps", "seeds", "MiB of all", f"fewer than {reference}"]
    head += ["loss", f"against {reference}: mean (least, most)"]
    return markdown([*head, f"against {REFERENCE} of as many steps"], lines)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which rows at the goal's steps have few enough bytes and are near enough, seed by seed."""
    said = []
    for row in rows:
        if row["every"] == GOAL_EVERY and statistics.fmean(row["fewer"]) >= FEWER:
            near = sum(one <= NEAR for one in row["above"])
            said.append(
                f"`{row['variant']}` sends {statistics.fmean(row['fewer']):.0f} times fewer bytes "
                f"than `{REFERENCE}`, and ends within {100 * NEAR:g}% of its loss for {near} of "
                f"{len(row['above'])} seeds."
            )
    return " ".join(said) or f"No variant sends {FEWER:g} times fewer bytes."


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss over bytes: at the end against the reference of the same seed, since rows have unlike
    seeds, and on the way."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(VARIANTS):
        of = [row for row in rows if row["variant"] == name]
        if not of:
            continue
        color = f"C{number}"
        points = [
            (statistics.fmean(row["bytes"]) / 2**20, 100 * statistics.fmean(row["above"]))
            for row in of
        ]
        left.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        for row, point in zip(of, points, strict=True):
            left.annotate(
                f"{row['every']}", point, fontsize=8, xytext=(3, 3), textcoords="offset points"
            )
            if row["every"] == GOAL_EVERY:
                curve = row["curve"][0]
                right.plot(
                    [one[1] / 2**20 for one in curve],
                    [one[2] for one in curve],
                    "o-",
                    color=color,
                    label=name,
                    markersize=3,
                )
    for axis, title in (
        (left, "at the end; numbers are local steps of a round"),
        (right, f"on the way, {GOAL_EVERY} local steps, one seed"),
    ):
        axis.set_xscale("log")
        axis.set_xlabel("MiB that all peers have sent")
        axis.set_title(title, fontsize=10)
    left.set_ylabel(f"loss against {REFERENCE}, {GOAL_EVERY}, of the same seed, %")
    right.set_ylabel("loss of the mean model, nats per byte")
    names = left.get_legend_handles_labels()
    figure.legend(*names, fontsize=9, ncols=6, loc="outside lower center")
    save(figure, path)


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the table."""
    found = results(entries)
    text = f"{table(found)}\n\n{verdict(found)}"
    publish(folder, NAME, found, "moshpit.md", {NAME: text}, partial(draw, found), indent=None)
    return text

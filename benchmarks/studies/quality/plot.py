"""The pictures of docs/quality.md, from whatever runs there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.common.pictures import band, plt, save
from benchmarks.common.results import Result

from .matrix import (
    BASE,
    CONTROL,
    GOAL_KINDS,
    GOALS,
    HEADLINE,
    KINDS,
    LOSSES,
    PAPER,
    PAPER_VALIDATION,
    UNREPAIRED,
    WORLDS,
    Run,
    compared,
    method_names,
)
from .rank import CURVE_STEPS
from .statistics import Measure, cells, perplexity_change
from .variants import variants

LINES = {UNREPAIRED: "--", CONTROL: ":"}
"""Where the line isn't solid."""
TITLES = {"gpt": "GPT: held-out perplexity", "digits": "Digits: exp(held-out loss)"}
LINEAR = 1.0
"""In %: below it the axis of changes is linear, above logarithmic."""
SMOOTHED = 3
"""Points of a curve of training loss that are averaged."""


def write(entries: Mapping[str, Result], folder: Path) -> None:
    for task in TITLES:
        if any(entry.settings["task"] == task for entry in entries.values()):
            _changes(entries, task, folder / f"quality-{task}.png")
            _drift(entries, task, folder / f"quality-{task}-drift.png")
            _curves(entries, task, folder / f"quality-{task}-curves.png")


def _lines(
    axes: Axes,
    entries: Mapping[str, Result],
    measure: Measure,
    cell: tuple[str, int, str],
    *,
    names: Sequence[str],
    positive: bool = False,
) -> None:
    """A line with its intervals for each variant, side by side so that they can be told apart.
    ``positive``: what isn't can't be drawn."""
    found = cells(entries, measure)
    for number, variant in enumerate(names):
        got = {loss: found.get((*cell, loss, variant)) for loss in sorted(LOSSES)}
        points = [(loss, one) for loss, one in got.items() if one is not None]
        points = [(loss, one) for loss, one in points if one.mean > 0 or not positive]
        style = variants()[variant]
        if points:
            axes.errorbar(
                [100 * loss + 0.5 * (number - (len(names) - 1) / 2) for loss, _ in points],
                [one.mean for _, one in points],
                [min(one.half or 0.0, one.mean if positive else 1e9) for _, one in points],
                color=style.colour,
                marker=style.marker,
                linestyle=LINES.get(variant, "-"),
                markersize=4,
                linewidth=1.2,
                elinewidth=0.7,
                capsize=2,
                label=variant,
            )
    axes.grid(alpha=0.3)
    axes.set_xticks([100 * loss for loss in sorted(LOSSES)])
    axes.set_title(f"{cell[1]} ranks, {cell[2]}")


def _legend(figure: Figure, axes: Sequence[Axes], below: bool = False) -> None:
    """Of all that is drawn, once, where it leaves the panels their width."""
    found: dict[str, Artist] = {}
    for one in axes:
        found |= {
            label: handle for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
        }
    if found:
        figure.legend(
            [*found.values()],
            [*found],
            loc="outside lower center" if below else "outside right upper",
            ncols=4 if below else 1,
        )


def _changes(entries: Mapping[str, Result], task: str, path: Path) -> None:
    """All variants on a logarithmic axis; below, the two methods alone on a linear one. The most
    ranks, and the kinds of loss with a goal: the tables have the others."""
    figure, table = plt.subplots(
        2, len(GOAL_KINDS), figsize=(10, 7), sharex=True, sharey="row", layout="constrained"
    )
    for row, names in zip(table, (compared(), method_names()), strict=True):
        for axes, kind in zip(row, GOAL_KINDS, strict=True):
            cell = (task, WORLDS[-1], kind)
            _lines(axes, entries, perplexity_change(HEADLINE), cell, names=names)
            axes.axhline(0, color="black", linewidth=0.8)
            if task == "gpt":
                xs = [100 * loss for loss in GOALS]
                axes.plot(xs, list(GOALS.values()), "k_", ms=24, mew=2, label="goal, at most")
            if names == method_names():
                continue
            if task == "gpt" and kind == "single":
                for said, mark, name in (
                    (PAPER, "kx", "paper, 7B"),
                    (PAPER_VALIDATION, "k+", "paper, 7B, validation"),
                ):
                    axes.plot([100 * x for x in said], list(said.values()), mark, ms=7, label=name)
            axes.set_yscale("symlog", linthresh=LINEAR)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in table[-1]:
        axes.set_xlabel("packets lost, %")
    for row in table:
        row[0].set_ylabel("change against reliable, %")
    figure.suptitle(
        f"{TITLES[task]} against the same seed's reliable run, 95% intervals\n"
        f"(lower half: the two methods alone)",
        x=0.4,
        fontsize=10,
    )
    _legend(figure, list(table.flat))
    save(figure, path, dpi=90)


def _drift(entries: Mapping[str, Result], task: str, path: Path) -> None:
    def relative(entry: Result, _: Result) -> float:
        return 100 * float(entry.figures["drift"]["relative"])

    figure, row = plt.subplots(
        1, len(KINDS), figsize=(11, 4.2), sharex=True, sharey=True, layout="constrained"
    )
    lossy = [variant for variant in compared() if variant != CONTROL]
    for axes, kind in zip(row, KINDS, strict=True):
        cell = (task, WORLDS[-1], kind)
        _lines(axes, entries, relative, cell, names=lossy, positive=True)
        axes.set_yscale("log")
        axes.set_xlabel("packets lost, %")
    row[0].set_ylabel("RMS distance of two replicas,\n% of the parameters' norm")
    figure.suptitle(
        f"{TITLES[task].partition(':')[0]}: distance between replicas after the last step\n"
        f"(nothing is drawn where they were equal in all runs)"
    )
    _legend(figure, list(row))
    save(figure, path, dpi=90)


def _smooth(curve: Sequence[float]) -> list[float]:
    """Each point with those before it."""
    last = [curve[max(0, k + 1 - SMOOTHED) : k + 1] for k in range(len(curve))]
    return [sum(points) / len(points) for points in last]


def _curves(entries: Mapping[str, Result], task: str, path: Path) -> None:
    """What training loss is above the reliable run's, by variant: the seeds' median and a band."""
    shown = (0.1, 0.4)
    figure, row = plt.subplots(1, len(shown), figsize=(10, 4.8), layout="constrained")
    for axes, loss in zip(row, shown, strict=True):
        for variant in compared():
            curves = []
            for entry in entries.values():
                run = Run.of(entry.settings)
                base = entries.get(run.base.key)
                if base and run.cell == (task, WORLDS[0], "single", loss, variant):
                    pairs = zip(entry.figures["curve"], base.figures["curve"], strict=True)
                    curves.append(_smooth([mine - other for mine, other in pairs]))
            if curves:
                steps = [CURVE_STEPS * (k + 0.5) for k in range(len(curves[0]))]
                look = {"color": variants()[variant].colour, "linestyle": LINES.get(variant, "-")}
                band(axes, steps, curves, variant, linewidth=1.4, **look)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="step", title=f"{WORLDS[0]} ranks, {loss:.0%} of packets lost one by one")
        axes.grid(alpha=0.3)
    row[0].set_ylabel(f"training loss above {BASE}, nats")
    figure.suptitle("Median of the seeds, and a band from the least to the greatest", fontsize=10)
    _legend(figure, list(row), below=True)
    save(figure, path, dpi=100)

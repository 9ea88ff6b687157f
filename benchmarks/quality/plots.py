"""The pictures of docs/quality.md, from whatever runs there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .matrix import ARMS, BASE, GOALS, KINDS, LOSSES, UNREPAIRED, WORLDS, Run
from .rank import CURVE_STEPS
from .report import HEADLINE, PAPER, PAPER_VALIDATION
from .statistics import Entry, Measure, cells, perplexity_change

COLOURS = {
    "reliable": "black",
    "zero-fill": "tab:red",
    "own-gradient": "tab:orange",
    "ddp": "tab:purple",
    UNREPAIRED: "tab:cyan",
    "ddp+driftbound": "tab:blue",
    "sharded": "tab:green",
    "smaller-batch": "tab:gray",
}
TITLES = {"gpt": "GPT: held-out perplexity", "digits": "Digits: exp(held-out loss)"}
LINEAR = 1.0
"""In %: below it the axis of changes is linear, above logarithmic."""


def write(entries: Mapping[str, Entry], folder: Path) -> None:
    for task in TITLES:
        if any(entry["run"]["task"] == task for entry in entries.values()):
            _changes(entries, task, folder / f"quality-{task}.png")
            _drift(entries, task, folder / f"quality-{task}-drift.png")
            _curves(entries, task, folder / f"quality-{task}-curves.png")


def _lines(
    axes: Axes, entries: Mapping[str, Entry], measure: Measure, task: str, world: int, kind: str
) -> None:
    """A line with its intervals for each arm; arms stand side by side so that they can be told."""
    found = cells(entries, measure)
    for number, arm in enumerate(ARMS):
        got = {loss: found.get((task, world, kind, loss, arm)) for loss in sorted(LOSSES)}
        points = [(loss, one) for loss, one in got.items() if one is not None]
        if points:
            axes.errorbar(
                [100 * loss + 0.5 * (number - len(ARMS) / 2) for loss, _ in points],
                [one.mean for _, one in points],
                [one.half or 0.0 for _, one in points],
                color=COLOURS[arm],
                marker="o",
                markersize=4,
                linewidth=1.2,
                capsize=2,
                label=arm,
            )
    axes.grid(alpha=0.3)
    axes.set_xticks([100 * loss for loss in sorted(LOSSES)])
    axes.set_title(f"{world} ranks, {kind}")


def _changes(entries: Mapping[str, Entry], task: str, path: Path) -> None:
    figure, table = plt.subplots(
        len(WORLDS), len(KINDS), figsize=(14, 7.5), sharex=True, sharey=True, layout="constrained"
    )
    for row, world in zip(table, WORLDS, strict=True):
        for axes, kind in zip(row, KINDS, strict=True):
            _lines(axes, entries, perplexity_change(HEADLINE), task, world, kind)
            axes.axhline(0, color="black", linewidth=0.8)
            if task == "gpt" and kind != "uneven":
                axes.plot(
                    [100 * loss for loss in GOALS], list(GOALS.values()), "k_", ms=14, label="goal"
                )
            if task == "gpt" and kind == "single":
                for said, mark, name in (
                    (PAPER, "kx", "paper, 7B"),
                    (PAPER_VALIDATION, "k+", "paper, 7B, validation"),
                ):
                    axes.plot([100 * x for x in said], list(said.values()), mark, ms=7, label=name)
            axes.set_yscale("symlog", linthresh=LINEAR)
    for axes in table[-1]:
        axes.set_xlabel("packets lost, %")
    for row in table:
        row[0].set_ylabel("change against reliable, %")
    figure.suptitle(f"{TITLES[task]} against the reliable run of the same seed (95% intervals)")
    handles, labels = table[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _drift(entries: Mapping[str, Entry], task: str, path: Path) -> None:
    def relative(entry: Entry, _: Entry) -> float:
        return 100 * float(entry["drift"]["relative"])

    figure, row = plt.subplots(
        1, len(KINDS), figsize=(14, 4), sharex=True, sharey=True, layout="constrained"
    )
    for axes, kind in zip(row, KINDS, strict=True):
        _lines(axes, entries, relative, task, WORLDS[0], kind)
        axes.set_xlabel("packets lost, %")
        axes.set_yscale("log")
    row[0].set_ylabel("RMS distance of two replicas,\n% of the parameters' norm")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(entries: Mapping[str, Entry], task: str, path: Path) -> None:
    """Training loss at single losses, mean over the seeds, by arm."""
    shown = (0.1, 0.4)
    figure, row = plt.subplots(1, len(shown), figsize=(12, 4.2), sharey=True, layout="constrained")
    for axes, loss in zip(row, shown, strict=True):
        for arm in (BASE, *ARMS):
            kind = ("none", 0.0) if arm == BASE else ("single", loss)
            curves = [
                entry["curve"]
                for entry in entries.values()
                if Run(**entry["run"]).cell == (task, WORLDS[0], *kind, arm)
            ]
            if curves:
                means = [sum(point) / len(point) for point in zip(*curves, strict=True)]
                steps = [CURVE_STEPS * (k + 0.5) for k in range(len(means))]
                style = {"linewidth": 4.0, "alpha": 0.3} if arm == BASE else {"linewidth": 1.2}
                axes.plot(steps, means, color=COLOURS[arm], label=arm, **style)
        axes.set(xlabel="step", title=f"{WORLDS[0]} ranks, {loss:.0%} of packets lost one by one")
        axes.grid(alpha=0.3)
        if task == "digits":
            axes.set_yscale("log")
    row[0].set_ylabel("training loss, nats")
    row[-1].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)

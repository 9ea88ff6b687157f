"""The plots of docs/arc_topk.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result

from .cells import DELAY_MS, HOSTS, LONG, LOSSES, TRAIN_MBIT
from .figures import MBITS, Curve, step_figures, trainings
from .long import plot as long_plot
from .tasks import TASKS
from .variants import NONE_VARIANTS, STEP_VARIANTS, TRAIN_VARIANTS

COLOURS = {
    "dense, gloo": "black",
    "dense, lossy": "tab:gray",
    "PowerSGD 1": "tab:cyan",
    "PowerSGD 4": "tab:blue",
    "Top-K 0.05": "tab:purple",
    "ARC 0.2": "tab:orange",
    "ARC 0.1": "tab:red",
    "ARC 0.05": "tab:brown",
}


def write(entries: Sequence[Result], folder: Path) -> None:
    """Those for which there are results."""
    curves = trainings(entries)
    if curves:
        draw_curves(curves, folder / "arc_topk-training.png")
    if any(entry.settings["kind"] == "steps" for entry in entries):
        draw_steps(entries, folder / "arc_topk-steps.png")
    if any(entry.settings["kind"] == LONG for entry in entries):
        long_plot.write(entries, folder / "arc_topk-long.png")


def style(variant: str) -> dict[str, Any]:
    name = variant if variant in COLOURS else variant.partition(", ")[0]
    usual = ":" if "none" in variant else "-"
    dashes = {"dense, lossy": "--", "dense, gloo": "--"}.get(variant, usual)
    return {"color": COLOURS[name], "linestyle": dashes}


def draw_curves(curves: Mapping[tuple[str, float, str], Curve], path: Path) -> None:
    """A row for each task, a column for each loss of packets; loss against seconds."""
    size = (5 * len(LOSSES), 3.6 * len(TASKS) + 1)
    figure, table = plt.subplots(
        len(TASKS), len(LOSSES), figsize=size, layout="constrained", squeeze=False
    )
    for line, task in zip(table, TASKS, strict=True):
        for axis, loss in zip(line, LOSSES, strict=True):
            for variant in (*TRAIN_VARIANTS, *NONE_VARIANTS):
                curve = curves.get((task, loss, variant), [])[1:]
                if curve:
                    xs, ys = [point[1] for point in curve], [point[3] for point in curve]
                    axis.plot(xs, ys, label=variant, linewidth=1.3, **style(variant))
            axis.set_xlabel("seconds of training")
            axis.grid(alpha=0.3)
            if task == "conv":
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("{x:g}")
            lost = f"{loss:.0%} of packets lost" if loss else "clean"
            axis.set_title(f"{task}, {lost}", fontsize=10)
        line[0].set_ylabel("held-out loss, nats")
    figure.suptitle(f"{HOSTS} ranks, {TRAIN_MBIT:g} Mbit/s; one run each")
    handles, labels = table[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    save(figure, path, dpi=90)


def draw_steps(entries: Sequence[Result], path: Path) -> None:
    figures = step_figures(entries)
    figure, row = plt.subplots(1, len(MBITS), figsize=(11, 3.6), layout="constrained")
    for axis, mbit in zip(row, MBITS, strict=True):
        known = [variant for variant in STEP_VARIANTS if (mbit, variant) in figures]
        times = [1e3 * figures[mbit, variant][0] for variant in known]
        axis.barh(known, times, color=[style(variant)["color"] for variant in known])
        axis.invert_yaxis()
        axis.set_xlabel("ms for a step of DDP, median")
        axis.set_title(f"{HOSTS} hosts, {mbit:g} Mbit/s, {2 * DELAY_MS:g} ms", fontsize=10)
        for i, value in enumerate(times):
            if math.isfinite(value):
                axis.text(value, i, f" {value:.0f}", va="center", fontsize=8)
        axis.margins(x=0.12)
    save(figure, path, dpi=100)

"""arc_topk.json, the plots, and the tables between the marks of arc_topk.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from benchmarks.studies.quality.report import between, markdown

from .cells import DELAY_MS, HOSTS, LOSSES, TRAIN_MBIT, Cell
from .tasks import TASKS
from .variants import NONE_WAYS, RULE_WAYS, STEP_WAYS, TRAIN_WAYS

MBITS = (100.0, 1000.0)
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
NEAR = 1.05
"""Of the loss that the dense run over the lossy backend ends with, for the seconds to reach it."""
Entry = Mapping[str, Any]
Curve = Sequence[Sequence[float]]
"""(step, seconds, bytes, loss, share of right answers)."""


def write(entries: Sequence[Entry], folder: Path) -> None:
    found = {
        "commits": sorted({entry["commit"] for entry in entries}),
        "entries": [{"cell": e["cell"], "found": e["found"]} for e in entries],
    }
    (folder / "arc_topk.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    page = folder / "arc_topk.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        for name, table in tables(entries).items():
            text = between(text, f"arc-{name}", table)
        page.write_text(text, encoding="utf-8")
    curves = trainings(entries)
    if curves:
        draw_curves(curves, folder / "arc_topk-training.png")
    if any(Cell.of(dict(e["cell"])).kind == "steps" for e in entries):
        draw_steps(entries, folder / "arc_topk-steps.png")


def tables(entries: Sequence[Entry]) -> dict[str, str]:
    curves = trainings(entries)
    return {
        "speed": speed(found(entries, "speed")),
        "forms": forms(found(entries, "forms")),
        "steps": steps(entries),
        **{f"train-{task}": training(curves, task) for task in TASKS},
        "rules": rules(curves),
    }


def found(entries: Sequence[Entry], kind: str) -> list[Any]:
    return [one for entry in entries if entry["cell"]["kind"] == kind for one in entry["found"]]


def trainings(entries: Sequence[Entry]) -> dict[tuple[str, float, str], Curve]:
    """Curves by (task, loss of packets, way)."""
    out = {}
    for entry in entries:
        cell = Cell.of(dict(entry["cell"]))
        if cell.kind == "train":
            for way, curve in entry["found"].items():
                out[cell.task, cell.loss, way] = curve
    return out


# ---- tables ----


def speed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Beside the time on the wire that is saved per MB of gradients, of a transpose or a ring."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_way: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_way.setdefault(row["way"], {})[row["model"]] = row
    dense = 2 * (HOSTS - 1) / HOSTS * 8  # Mbit to and fro, per MB
    out = []
    for way, cells in by_way.items():
        saved = dense * (1 - next(iter(cells.values()))["share"])
        out.append(
            [
                way,
                *(f"{cells[model]['ms_per_mb']:.2f}" for model in models),
                *(f"{1e3 * saved / mbit:.0f}" for mbit in MBITS),
            ]
        )
    head = ["way", *(f"ms per MB: {model}" for model in models)]
    return markdown([*head, *(f"saved at {mbit:g} Mbit/s, ms per MB" for mbit in MBITS)], out)


def forms(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each form the best sketch."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    names = list(dict.fromkeys(row["form"] for row in rows))
    columns = [(kind, budget) for kind in kinds for budget in (0.1, 0.2)]
    out = []
    for name in names:
        line = [name]
        for kind, budget in columns:
            fit = [r for r in rows if (r["kind"], r["form"], r["budget"]) == (kind, name, budget)]
            best = max(fit, key=lambda r: r["kept"], default=None)
            line.append("-" if best is None else f"{best['kept']:.3f} (r={best['sketch_dim']})")
        out.append(line)
    return markdown(["form", *(f"{kind}, {budget:.0%}" for kind, budget in columns)], out)


def step_figures(entries: Sequence[Entry]) -> dict[tuple[float, str], tuple[float, float, float]]:
    """(median seconds, least, bytes) by rate and way."""
    out = {}
    for entry in entries:
        cell = Cell.of(dict(entry["cell"]))
        if cell.kind == "steps":
            for way, one in entry["found"].items():
                seconds, volume = one["seconds"], one["bytes"]
                out[cell.mbit, way] = (
                    statistics.median(seconds),
                    min(seconds),
                    statistics.median(volume),
                )
    return out


def steps(entries: Sequence[Entry]) -> str:
    figures = step_figures(entries)
    rows = []
    for way in STEP_WAYS:
        line = [way]
        for mbit in MBITS:
            got, dense = figures.get((mbit, way)), figures.get((mbit, "dense, gloo"))
            if got is None or dense is None:
                line += ["-", "-"]
            else:
                line += [f"{1e3 * got[0]:.0f} ({1e3 * got[1]:.0f})", f"{dense[0] / got[0]:.1f}x"]
        first = figures.get((MBITS[0], way))
        rows.append([*line, "-" if first is None else f"{first[2] / 1e6:.2f}"])
    head = [
        f"{mbit:g} Mbit/s: {what}" for mbit in MBITS for what in ("ms a step (least)", "faster")
    ]
    return markdown(["way", *head, "MB sent by a host"], rows)


def reached(curve: Curve, loss: float) -> float | None:
    """Seconds until the curve is at ``loss``, on a straight line between its points, or None."""
    for before, after in pairwise(curve):
        if after[3] <= loss:
            drop = before[3] - after[3]
            share = (before[3] - loss) / drop if drop > 0 else 1.0
            return float(before[1] + min(1.0, max(0.0, share)) * (after[1] - before[1]))
    return None


def training(curves: Mapping[tuple[str, float, str], Curve], task: str) -> str:
    base = curves.get((task, 0.0, "dense, lossy"))
    if base is None:
        return "No runs yet."
    steps_all, goal = base[-1][0], NEAR * base[-1][3]
    rows = []
    for way in (*TRAIN_WAYS, *NONE_WAYS):
        line = [way]
        for loss in LOSSES:
            curve = curves.get((task, loss, way))
            if curve is None:
                line += ["-"] * 4
                continue
            last = curve[-1]
            cut = "" if last[0] == steps_all else f" (cut off at step {last[0]})"
            spent = reached(curve, goal)
            line += [
                f"{last[3]:.4f}{cut}" + (f", {last[4]:.1%}" if task == "conv" else ""),
                f"{last[1]:.1f}",
                "not reached" if spent is None else f"{spent:.1f}",
                f"{last[2] / 1e6:.1f}",
            ]
        rows.append(line)
    head = [
        f"{'clean' if not loss else f'{loss:.0%} lost'}: {what}"
        for loss in LOSSES
        for what in ("loss at the end", "seconds", f"seconds to {goal:.3f}", "MB sent by a host")
    ]
    return markdown(["way", *head], rows)


def rules(curves: Mapping[tuple[str, float, str], Curve]) -> str:
    """Rules of error feedback, of the GPT at 10% loss."""
    rows = []
    for way in ("dense, lossy", "ARC 0.1, lossy", *RULE_WAYS):
        curve = curves.get(("gpt", 0.1, way))
        if curve is not None:
            name = "ARC 0.1, lossy, EF14" if way == "ARC 0.1, lossy" else way
            rows.append([name, f"{curve[-1][3]:.4f}"])
    return markdown(["way", "loss at the end"], rows)


# ---- plots ----


def style(way: str) -> dict[str, Any]:
    name = way if way in COLOURS else way.partition(", ")[0]
    dashes = {"dense, lossy": "--", "dense, gloo": "--"}.get(way, ":" if "none" in way else "-")
    return {"color": COLOURS[name], "linestyle": dashes}


def draw_curves(curves: Mapping[tuple[str, float, str], Curve], path: Path) -> None:
    """A row for each task and loss of packets; loss against steps, bytes and seconds."""
    kinds = [(task, loss) for task in TASKS for loss in LOSSES]
    figure, table = plt.subplots(
        len(kinds), 3, figsize=(13, 3.1 * len(kinds)), layout="constrained", squeeze=False
    )
    what = ((0, 1.0, "step"), (2, 1e-6, "MB sent by a host"), (1, 1.0, "seconds of training"))
    for line, (task, loss) in zip(table, kinds, strict=True):
        for axis, (column, scale, label) in zip(line, what, strict=True):
            for way in (*TRAIN_WAYS, *NONE_WAYS):
                curve = curves.get((task, loss, way), [])[1:]
                if curve:
                    xs = [scale * point[column] for point in curve]
                    axis.plot(xs, [p[3] for p in curve], label=way, linewidth=1.3, **style(way))
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
            if task == "conv":
                axis.set_yscale("log")
        lost = f"{loss:.0%} of packets lost" if loss else "clean"
        line[0].set_ylabel("held-out loss, nats")
        line[0].set_title(f"{task}, {lost}", fontsize=10)
    figure.suptitle(f"{HOSTS} ranks, {TRAIN_MBIT:g} Mbit/s")
    handles, labels = table[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_steps(entries: Sequence[Entry], path: Path) -> None:
    figures = step_figures(entries)
    figure, row = plt.subplots(1, len(MBITS), figsize=(11, 3.6), layout="constrained")
    for axis, mbit in zip(row, MBITS, strict=True):
        known = [way for way in STEP_WAYS if (mbit, way) in figures]
        times = [1e3 * figures[mbit, way][0] for way in known]
        axis.barh(known, times, color=[style(way)["color"] for way in known])
        axis.invert_yaxis()
        axis.set_xlabel("ms for a step of DDP, median")
        axis.set_title(f"{HOSTS} hosts, {mbit:g} Mbit/s, {2 * DELAY_MS:g} ms", fontsize=10)
        for i, value in enumerate(times):
            if math.isfinite(value):
                axis.text(value, i, f" {value:.0f}", va="center", fontsize=8)
        axis.margins(x=0.12)
    figure.savefig(path, dpi=100)
    plt.close(figure)

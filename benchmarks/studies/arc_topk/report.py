"""arc_topk.json, and the tables between the marks of arc_topk.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import markdown, publish

from . import claims, plot
from .cells import HOSTS, LOSSES
from .figures import MBITS, Curve, step_figures, trainings
from .long import report as long_report
from .speedup import NETWORK
from .tasks import TASKS
from .variants import NONE_VARIANTS, RULE_VARIANTS, STEP_VARIANTS, TRAIN_VARIANTS

NEAR = 1.05
"""Of the loss that the dense run over the lossy backend ends with, for the seconds to reach it."""


def write(entries: Sequence[Result], folder: Path) -> None:
    text = {f"arc-{name}": table for name, table in tables(entries).items()}
    publish(folder, "arc_topk", as_json(entries), "arc_topk.md", text, indent=None)
    plot.write(entries, folder)


def as_json(entries: Sequence[Result]) -> dict[str, Any]:
    return {
        "commits": sorted({entry.commit for entry in entries}),
        "entries": [{"settings": e.settings, "figures": e.figures} for e in entries],
    }


def tables(entries: Sequence[Result]) -> dict[str, str]:
    curves = trainings(entries)
    return {
        "speed": speed(found(entries, "speed")),
        "forms": forms(found(entries, "forms")),
        "steps": steps(entries),
        "speedup": claims.speedup(entries),
        "speedup-network": claims.speedup(entries, NETWORK),
        "contraction": claims.contraction(found(entries, "contraction")),
        "shares": claims.shares(entries),
        **{f"train-{task}": training(curves, task) for task in TASKS},
        "rules": rules(curves),
        **long_report.tables(entries),
    }


def found(entries: Sequence[Result], kind: str) -> list[Any]:
    """The figures of all results of a kind whose figures are a list."""
    return [one for entry in entries if entry.settings["kind"] == kind for one in entry.figures]


def speed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Beside the time on the wire that is saved per MB of gradients, of a transpose or a ring."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_variant: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["model"]] = row
    dense = 2 * (HOSTS - 1) / HOSTS * 8  # Mbit to and fro, per MB
    out = []
    for variant, cells in by_variant.items():
        saved = dense * (1 - next(iter(cells.values()))["share"])
        out.append(
            [
                variant,
                *(f"{cells[model]['ms_per_mb']:.2f}" for model in models),
                *(f"{1e3 * saved / mbit:.0f}" for mbit in MBITS),
            ]
        )
    head = ["variant", *(f"ms per MB: {model}" for model in models)]
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


def steps(entries: Sequence[Result]) -> str:
    figures = step_figures(entries)
    rows = []
    for variant in STEP_VARIANTS:
        line = [variant]
        for mbit in MBITS:
            got, dense = figures.get((mbit, variant)), figures.get((mbit, "dense, gloo"))
            if got is None or dense is None:
                line += ["-", "-"]
            else:
                line += [f"{1e3 * got[0]:.0f} ({1e3 * got[1]:.0f})", f"{dense[0] / got[0]:.1f}x"]
        first = figures.get((MBITS[0], variant))
        rows.append([*line, "-" if first is None else f"{first[2] / 1e6:.2f}"])
    head = [
        f"{mbit:g} Mbit/s: {what}" for mbit in MBITS for what in ("ms a step (least)", "faster")
    ]
    return markdown(["variant", *head, "MB sent by a host"], rows)


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
    for variant in (*TRAIN_VARIANTS, *NONE_VARIANTS):
        line = [variant]
        for loss in LOSSES:
            curve = curves.get((task, loss, variant))
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
    return markdown(["variant", *head], rows)


def rules(curves: Mapping[tuple[str, float, str], Curve]) -> str:
    """Rules of error feedback, of the GPT at 10% loss."""
    rows = []
    for variant in ("dense, lossy", "ARC 0.1, lossy", *RULE_VARIANTS):
        curve = curves.get(("gpt", 0.1, variant))
        if curve is not None:
            name = "ARC 0.1, lossy, EF14" if variant == "ARC 0.1, lossy" else variant
            rows.append([name, f"{curve[-1][3]:.4f}"])
    return markdown(["variant", "loss at the end"], rows)

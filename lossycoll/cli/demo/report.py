"""Turns what the ranks of the demo measured into figures, a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Column, Table

from .methods import DDP, DEMO_RUNS, Method, methods

LOSSLESS: Final = dict(zip(DEMO_RUNS, (("tab:blue", 6.0), ("tab:green", 3.0)), strict=True))
"""Colours and widths of lines in the picture. Curves lie on top of one another: the first is drawn
wide, the others within it."""


def demo_runs() -> dict[str, Method]:
    """Methods of all runs by the runs' names, in the order in which they are done and shown."""
    return dict.fromkeys(DEMO_RUNS, DDP) | {one.run_name: one for one in methods()}


Run = dict[str, Any]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def summarize(ranks: list[Run], backend: str, loss: float, seconds: float) -> Run:
    """One run's figures. Losses are of the last step, the drift is that of the second half."""
    first = ranks[0]
    steps = [value for rank in ranks for value in rank["step_seconds"]]
    last = [rank["validation"][-1][1] for rank in ranks]
    traffic = None
    if first["traffic"] is not None:
        traffic = {name: sum(rank["traffic"][name] for rank in ranks) for name in first["traffic"]}
    return {
        "backend": backend,
        "injected_loss": loss,
        "validation_loss": last[0],
        "perplexity": math.exp(last[0]),
        "validation_loss_of_replicas": last,
        "perplexity_replica_mean": statistics.fmean(map(math.exp, last)),
        "step_ms_p50": 1e3 * percentile(steps, 0.5),
        "step_ms_p99": 1e3 * percentile(steps, 0.99),
        "traffic": traffic,
        "drift": mean_drift(first["drift"], len(first["train"])),
        "seconds": seconds,
        "parameters": first["parameters"],
        "corpus": first["corpus"],
        "curves": {
            # Ranks train on different windows; their mean is the loss of the step.
            "train": [
                statistics.fmean(values)
                for values in zip(*(rank["train"] for rank in ranks), strict=True)
            ],
            "validation": first["validation"],
            "drift": first["drift"],
        },
    }


def mean_drift(curve: list[tuple[int, Run]], steps: int) -> Run:
    """The means over the measurements in the second half of ``steps``; of RMS distances the root of
    the mean square. ``expected`` is None where no bound is."""
    found = [figures for step, figures in curve if 2 * step > steps]
    expected = [figures["expected"] for figures in found]
    return {
        "measurements": len(found),
        "mean_square_distance": statistics.fmean(one["mean_square_distance"] for one in found),
        "relative_rms": math.sqrt(statistics.fmean(one["relative_rms"] ** 2 for one in found)),
        "expected": None if None in expected else statistics.fmean(expected),
    }


def compare(runs: dict[str, Run]) -> None:
    """Adds each run's change of perplexity against gloo, where gloo has run too."""
    for run in runs.values():
        run["perplexity_change_percent"] = None
        if base := runs.get("gloo"):
            run["perplexity_change_percent"] = 100 * (run["perplexity"] / base["perplexity"] - 1)


def _traffic(name: str, scale: float = 1) -> Callable[[Run], str]:
    # gloo moves its bytes by TCP and does not count them.
    return lambda run: f"{run['traffic'][name] * scale:,.0f}" if run["traffic"] else "-"


def _percent(run: Run) -> str:
    change = run["perplexity_change_percent"]
    return "-" if change is None else f"{change:+.2f}%"


def _expected(run: Run) -> str:
    found = run["drift"]["expected"]
    return "grows" if found is None else f"{found:.3g}"


FIGURES: Final[dict[str, Callable[[Run], str]]] = {
    "packets dropped on purpose": lambda run: f"{run['injected_loss']:.0%}",
    "validation loss, nats per byte": lambda run: f"{run['validation_loss']:.4f}",
    "perplexity per byte (rank 0)": lambda run: f"{run['perplexity']:.3f}",
    "against gloo": _percent,
    "mean over replicas": lambda run: f"{run['perplexity_replica_mean']:.3f}",
    "step time p50, ms": lambda run: f"{run['step_ms_p50']:.1f}",
    "step time p99, ms": lambda run: f"{run['step_ms_p99']:.1f}",
    "packets sent": _traffic("packets_sent"),
    "dropped by injection": _traffic("packets_injected"),
    "given up as missing": _traffic("packets_missing"),
    "MB sent": _traffic("bytes_sent", 1e-6),
    "distance of the replicas, squared": lambda run: f"{run['drift']['mean_square_distance']:.3g}",
    "by theory": _expected,
    "its root over the parameter norm": lambda run: f"{run['drift']['relative_rms']:.3%}",
    "whole run, s": lambda run: f"{run['seconds']:.0f}",
}
"""The rows of the demo's table: each run's figure as text."""


def table(runs: dict[str, Run]) -> Table:
    """A column for each run, a row for each figure."""
    columns = (Column(name, justify="right") for name in runs)
    out = Table("", *columns, title="Same seed, same data, same steps")
    for label, show in FIGURES.items():
        out.add_row(label, *(show(run) for run in runs.values()))
    return out


def remarks(runs: dict[str, Run]) -> list[str]:
    """Remarks on the table about the distance between replicas."""
    drifting = [name for name, run in runs.items() if run["drift"]["mean_square_distance"] > 0]
    if not drifting:
        return []
    said = (
        f"{name}: {method.summary}."
        for name, method in demo_runs().items()
        if name not in DEMO_RUNS and name in drifting and method.summary
    )
    return [
        " ".join([*said, "The guide says which to use when."]),
        "Distances are exact, over all pairs of ranks, and means over the second half of the steps;"
        " what they should be by theory is on the demo's page.",
    ]


PARTS = 8


def means(curve: list[tuple[int, dict[str, Any]]], name: str) -> list[tuple[float, float]]:
    """The mean step and the mean of figure ``name``, of each of PARTS equal parts of the steps;
    left out are those that a log axis can't show."""
    last = curve[-1][0]
    parts: dict[int, list[tuple[int, float]]] = {}
    for step, figures in curve:
        parts.setdefault(math.ceil(PARTS * step / last), []).append((step, figures[name]))
    points = [
        (statistics.fmean(step for step, _ in part), statistics.fmean(value for _, value in part))
        for _, part in sorted(parts.items())
    ]
    return [(step, value) for step, value in points if value > 0]


def excess(run: dict[str, Any], base: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, change of the validation perplexity against ``base``, in %), where both have one."""
    wanted = dict(base["curves"]["validation"])
    return [
        (step, 100 * math.expm1(loss - wanted[step]))
        for step, loss in run["curves"]["validation"]
        if step in wanted
    ]


def draw(results: dict[str, Any], plt: Any, path: Path) -> None:
    """Costs on the left, drift on the right, a line for each run."""
    figure, (costs, drift) = plt.subplots(1, 2, figsize=(11, 4.6))
    runs, known = results["runs"], demo_runs()
    base_name = next(iter(runs))
    equal: list[str] = []
    for name, run in runs.items():
        label = f"{name}, {run['injected_loss']:.0%} lost" if run["injected_loss"] else name
        colour, width = LOSSLESS.get(name) or (known[name].colour, 1.4)
        style = {"color": colour, "marker": "o", "markersize": 4}
        points = zip(*excess(run, runs[base_name]), strict=True)
        costs.plot(*points, **style, linewidth=width, label=label)
        curve = run["curves"]["drift"]
        if measured := means(curve, "mean_square_distance"):
            drift.plot(*zip(*measured, strict=True), **style, linewidth=width)
        else:
            equal.append(name)
        if curve[-1][1]["expected"]:
            expected = zip(*means(curve, "expected"), strict=True)
            drift.plot(*expected, "--", color=colour, linewidth=2.4)
    zeros = f" (0: {', '.join(equal)})" if equal else ""
    drift.plot([], [], "--", color="tab:gray", linewidth=2.4, label="by theory")
    costs.set(
        title=f"Validation perplexity against {base_name}",
        ylabel=f"% of the perplexity of {base_name}",
    )
    title = f"Distance between replicas{zeros}"
    drift.set(title=title, ylabel="squared L2 distance", yscale="log")
    for axes in (costs, drift):
        axes.set(xlabel="step")
    figure.legend(loc="outside lower center", ncols=len(runs) + 1)
    figure.savefig(path)

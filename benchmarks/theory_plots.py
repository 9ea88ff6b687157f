"""The pictures of docs/theory.md, from the figures of docs/theory.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import theory_formulas as formulas

CURVE = np.linspace(0.001, 0.45, 100)
DPI = 110


def draw(found: dict[str, Any], folder: Path) -> None:
    """Writes theory-means.png, theory-broadcast.png and theory-steps.png."""
    pictures = {
        "theory-means.png": (
            (standard_errors, "unbiased"),
            (inflation, "inflation"),
            (estimators, "estimators"),
        ),
        "theory-broadcast.png": (
            (broadcast, "broadcast"),
            (staleness, "broadcast"),
            (bursts, "bursts"),
        ),
        "theory-steps.png": ((steps, "steps"), (optimizers, "optimizers")),
    }
    for name, panels in pictures.items():
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6.2 * len(panels), 4.6), layout="constrained"
        )
        for panel, (function, key) in zip(axes, panels, strict=True):
            function(panel, found[key])
            panel.grid(alpha=0.3)
        figure.savefig(folder / name, dpi=DPI)
        plt.close(figure)


def standard_errors(axes: Any, rows: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    marks = {"ring": "o", "transpose": "s", "reduce_scatter": "^"}
    for algorithm, mark in marks.items():
        mine = [row for row in rows if row["algorithm"] == algorithm]
        axes.plot(
            [row["standard_errors"] for row in mine],
            [cases.index(row["case"]) for row in mine],
            mark,
            label=algorithm.replace("_", "-"),
        )
    axes.axvline(4, color="tab:red", linestyle="--", label="4 standard errors")
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set(xlabel="worst segment's distance from the mean, standard errors")
    axes.set_title("Unbiased: left of the line")
    axes.legend()


def inflation(axes: Any, rows: list[dict[str, Any]]) -> None:
    for world in sorted({row["world"] for row in rows}):
        line = axes.plot(
            CURVE, [formulas.inflation(p, world) for p in CURVE], label=f"{world} ranks, predicted"
        )[0]
        mine = [row for row in rows if row["world"] == world]
        axes.plot(
            [row["loss"] for row in mine],
            [row["measured"] for row in mine],
            "o",
            color=line.get_color(),
            label=f"{world} ranks, measured",
        )
    axes.set(xlabel="loss p", ylabel="variance of the mean, lossless = 1")
    axes.set_title("Variance: (1 - p^N) / (1 - p)")
    axes.legend()


def estimators(axes: Any, rows: list[dict[str, Any]]) -> None:
    for mean in sorted({row["mean"] for row in rows}):
        line = axes.plot(
            CURVE,
            [formulas.weighted_variance(p, 4, mean) for p in CURVE],
            label=f"weighted, mean {mean:g}",
        )[0]
        for name, mark in (("inverse_probability", "o"), ("count", "x")):
            mine = [r for r in rows if (r["mean"], r["estimator"]) == (mean, name)]
            axes.plot(
                [row["loss"] for row in mine],
                [row["measured"] for row in mine],
                mark,
                color=line.get_color(),
                label=f"measured: {name.replace('_', ' ')}",
            )
    axes.plot(CURVE, [formulas.inflation(p, 4) for p in CURVE], "--", color="gray", label="count")
    axes.set(xlabel="loss p", ylabel="variance of the mean, lossless = 1")
    axes.set_title("Cost of weights: contributions of N(mean, 1), 4 ranks")
    axes.legend(fontsize=7)


def broadcast(axes: Any, rows: list[dict[str, Any]]) -> None:
    for mean, colour in ((0.0, "tab:blue"), (0.5, "tab:green")):
        axes.plot(
            CURVE,
            [formulas.broadcast_drift(p, mean=mean) for p in CURVE],
            color=colour,
            label="2p/(1-p²)" + (f" + {mean:g}²·2p/(1-p)²" if mean else ""),
        )
        mine = [row for row in rows if row["mean"] == mean]
        axes.plot(
            [row["loss"] for row in mine],
            [row["drift"] for row in mine],
            "o",
            color=colour,
            label=f"measured, steps of mean {mean:g}",
        )
    still = [row for row in rows if row["mean"] == 0]
    axes.plot(
        CURVE,
        [formulas.broadcast_drift_published(p) for p in CURVE],
        "--",
        color="tab:red",
        label="2p/(1+p), as published",
    )
    axes.plot(CURVE, [formulas.owner_distance(p) for p in CURVE], color="tab:gray", label="p/(1-p)")
    axes.plot(
        [row["loss"] for row in still],
        [row["from_owner"] for row in still],
        "o",
        color="tab:gray",
        label="measured, owner to receiver",
    )
    axes.set(xlabel="loss p", ylabel="squared distance, variance of a step = 1")
    axes.set_title("Drift of broadcast parameters")
    axes.legend()


def staleness(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in [row for row in rows if row["mean"] == 0]:
        p = row["loss"]
        steps = [k for k, tail in enumerate(row["older"]) if tail > 0]
        line = axes.plot(
            steps, [row["older"][k] for k in steps], "o", label=f"measured, p = {p:g}"
        )[0]
        shown = np.linspace(0, 8, 50)
        axes.plot(shown, [p**k for k in shown], color=line.get_color(), linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(1e-6, 1.5)
    axes.set(xlabel="age K, steps", ylabel="share of values at least that old")
    axes.set_title("Staleness: p^K (lines)")
    axes.legend()


def bursts(axes: Any, rows: list[dict[str, Any]]) -> None:
    shown = np.linspace(1.3, 16, 60)
    for loss in sorted({row["loss"] for row in rows}):
        line = axes.plot(
            shown, [formulas.burst_drift(loss, b) for b in shown], label=f"p = {loss:g}, predicted"
        )[0]
        mine = [row for row in rows if row["loss"] == loss]
        axes.plot(
            [row["burst"] for row in mine],
            [row["drift"] for row in mine],
            "o",
            color=line.get_color(),
            label=f"p = {loss:g}, measured",
        )
    axes.set(xlabel="mean burst, steps", ylabel="squared distance, variance of a step = 1")
    axes.set_title("Drift if losses come in runs of steps")
    axes.legend()


def steps(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row, colour in zip(rows, ("tab:blue", "tab:red"), strict=True):
        at = np.array(row["at"])
        axes.plot(at, row["free"], color=colour, label=f"p = {row['loss']:g}, without DriftBound")
        axes.plot(at, at * row["per_step_predicted"], ":", color="black", linewidth=1)
        for part, style in zip(row["bound"], ("-", "--", "-."), strict=True):
            axes.plot(
                at,
                part["drift"],
                style,
                color=colour,
                alpha=0.6,
                label=f"p = {row['loss']:g}, period 16, repair {part['repair']}",
            )
            axes.axhline(part["predicted"], color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set(xlabel="step", ylabel="squared distance per element (gradients: N(0, 1))")
    axes.set_title("Drift of reduced gradients, 3 ranks (dotted: predicted)")
    axes.legend(fontsize=7)


def optimizers(axes: Any, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["loss"] == 0.3]
    arms = list(dict.fromkeys((r["period"], r["repair"], r["state"]) for r in rows))
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        mine = [r for r in rows if (r["period"], r["repair"], r["state"]) == arm]
        period, repair, state = arm
        label = f"period {period}, repair {repair}" + (", state too" if state else "")
        axes.bar(
            [names.index(r["optimizer"]) + (i - len(arms) / 2 + 0.5) * width for r in mine],
            [r["drift"] for r in mine],
            width,
            label=label if period else "without DriftBound",
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_yscale("log")
    axes.set_ylim(top=8 * max(row["drift"] for row in rows))  # room for the legend
    axes.set(ylabel="squared distance of replicas")
    axes.set_title("Trained networks, p = 0.3: is the state worth its bytes?")
    axes.legend(fontsize=7)

"""The pictures of docs/theory.md, from the figures of docs/theory.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.pictures import panels, save

from . import formulas
from .tables import RARE

CURVE = np.linspace(0.001, 0.45, 100)
Panel = tuple[Callable[[Any, Any], None], Any]
"""What draws it, and of which figures."""


def draw(found: dict[str, Any], folder: Path) -> None:
    """Writes theory-means.png, theory-broadcast.png, theory-steps.png and theory-groups.png."""
    state = [*found["momentum"], *found["adam"]]
    pictures: dict[str, Sequence[Panel]] = {
        "theory-means.png": (
            (standard_errors, found["unbiased"]),
            (inflation, (found["inflation"], found["stratified"])),
            (estimators, found["estimators"]),
        ),
        "theory-broadcast.png": (
            (broadcast, found["broadcast"]),
            (staleness, found["broadcast"]),
            (bursts, found["bursts"]),
        ),
        "theory-steps.png": (
            (steps, found["steps"]),
            (repairs, found["steps"]),
            (states, state),
            (optimizers, found["optimizers"]),
        ),
        "theory-groups.png": (
            (one_round, found["groups"]["single"]),
            (rounds, found["groups"]["many"]),
        ),
    }
    for name, shown in pictures.items():
        figure, axes = panels(len(shown), 5.6, 4.4)
        for panel, (function, figures) in zip(axes, shown, strict=True):
            function(panel, figures)
            panel.grid(alpha=0.3)
        save(figure, folder / name)


def against(
    axes: Any,
    formula: Callable[[float], float],
    rows: Sequence[dict[str, Any]],
    x: str,
    y: str,
    *,
    at: Sequence[float] | NDArray[np.float64] = CURVE,
    style: str = "-",
    mark: str = "o",
    colour: str | None = None,
    label: str,
    measured: str | None = None,
) -> None:
    """What is predicted as a line, and what was measured as points of its colour."""
    (line,) = axes.plot(at, [formula(value) for value in at], style, color=colour, label=label)
    points = [row[x] for row in rows], [row[y] for row in rows]
    axes.plot(*points, mark, color=line.get_color(), label=measured)


def measured_as(axes: Any, mark: str, text: str) -> None:
    """One entry of the legend for all points of a kind, whatever their colour."""
    axes.plot([], [], mark, color="tab:gray", label=text)


def standard_errors(axes: Any, rows: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    algorithms = {"ring": ("o", -0.2), "transpose": ("s", 0.0), "reduce_scatter": ("^", 0.2)}
    for algorithm, (mark, beside) in algorithms.items():
        mine = [row for row in rows if row["algorithm"] == algorithm]
        axes.plot(
            [row["standard_errors"] for row in mine],
            [cases.index(row["case"]) + beside for row in mine],
            mark,
            label=algorithm.replace("_", "-"),
        )
    axes.axvline(4, color="tab:red", linestyle="--", label="4 standard errors")
    biased = cases.index("uneven, by count")
    axes.axhspan(biased - 0.5, biased + 0.5, color="tab:red", alpha=0.1)
    axes.text(0.45, biased, "biased, by theory", va="center", fontsize=8)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 4, 10, 20, 50, 100)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.4, 130)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set(xlabel="worst segment's distance from the mean, standard errors")
    axes.set_title("Unbiased: left of the line")
    axes.legend()


def inflation(axes: Any, rows: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    colours = ("tab:blue", "tab:orange", "tab:green")
    for found, formula, style, mark in (
        (rows[0], formulas.inflation, "-", "o"),
        (rows[1], formulas.stratified_variance, "--", "^"),
    ):
        for world, colour in zip(sorted({row["world"] for row in found}), colours, strict=True):
            kind = "" if style == "-" else ", reduce-scatter"
            against(
                axes,
                partial(formula, world=world),
                [row for row in found if row["world"] == world],
                *("loss", "measured"),
                style=style,
                mark=mark,
                colour=colour,
                label=f"{world} ranks{kind}, predicted",
            )
    measured_as(axes, "o", "measured")
    measured_as(axes, "^", "reduce-scatter, measured")
    axes.set(xlabel="loss p", ylabel="variance of the mean, lossless = 1")
    axes.set_title("Variance by count, and of a reduce-scatter")
    axes.legend(fontsize=8)


def estimators(axes: Any, rows: list[dict[str, Any]]) -> None:
    for mean in sorted({row["mean"] for row in rows}):
        against(
            axes,
            partial(formulas.weighted_variance, world=4, mean=mean),
            [r for r in rows if (r["mean"], r["estimator"]) == (mean, "inverse_probability")],
            *("loss", "measured"),
            label=f"weighted, mean {mean:g}, predicted",
        )
    axes.plot(
        CURVE,
        [formulas.inflation(p, 4) for p in CURVE],
        "--",
        color="black",
        label="count, any mean, predicted",
    )
    counted = [row for row in rows if row["estimator"] == "count"]
    measured_as(axes, "o", "weighted, measured")
    axes.plot(
        [row["loss"] for row in counted],
        [row["measured"] for row in counted],
        "x",
        color="black",
        label="count, measured at each mean",
    )
    axes.set(xlabel="loss p", ylabel="variance of the mean, lossless = 1")
    axes.set_title("Cost of weights: contributions of N(mean, 1), 4 ranks")
    axes.legend()


def broadcast(axes: Any, rows: list[dict[str, Any]]) -> None:
    for mean, colour in ((0.0, "tab:blue"), (0.5, "tab:green")):
        against(
            axes,
            partial(formulas.broadcast_drift, mean=mean),
            [row for row in rows if row["mean"] == mean],
            *("loss", "drift"),
            colour=colour,
            label="2p/(1-p^2)" + (f" + {mean:g}^2 2p/(1-p)^2" if mean else ""),
            measured=f"measured, steps of mean {mean:g}",
        )
    still = [row for row in rows if row["mean"] == 0]
    axes.plot(
        CURVE,
        [formulas.broadcast_drift_published(p) for p in CURVE],
        "--",
        color="tab:red",
        label="2p/(1+p), as published",
    )
    against(
        axes,
        formulas.owner_distance,
        still,
        *("loss", "from_owner"),
        colour="tab:gray",
        label="p/(1-p)",
        measured="measured, owner to receiver",
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
    for loss in sorted({row["loss"] for row in rows}):
        against(
            axes,
            partial(formulas.burst_drift, loss),
            [row for row in rows if row["loss"] == loss],
            *("burst", "drift"),
            at=np.linspace(1.3, 16, 60),
            label=f"p = {loss:g}, predicted",
            measured=f"p = {loss:g}, measured",
        )
    axes.set(xlabel="mean burst, steps", ylabel="squared distance, variance of a step = 1")
    axes.set_title("Drift if losses come in runs of steps")
    axes.legend()


COLOURS = {0.1: "tab:blue", 0.3: "tab:red"}


def steps(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        at, colour = np.array(row["at"]), COLOURS[row["loss"]]
        axes.plot(at, row["free"], color=colour, label=f"p = {row['loss']:g}, without DriftBound")
        axes.plot(at, at * row["per_step_predicted"], ":", color="black", linewidth=1)
        for part in row["bound"]:
            # Those between lie on one another, and are in the next panel.
            if part["repair"] in (0, 2):
                axes.plot(
                    at,
                    part["drift"],
                    "-" if part["repair"] else "--",
                    color=colour,
                    alpha=0.6,
                    label=f"p = {row['loss']:g}, period 16, repair {part['repair']}",
                )
                axes.axhline(part["predicted"], color="black", linestyle=":", linewidth=1)
    lowest = min(rows, key=lambda row: row["loss"])
    axes.annotate(
        "slope 1: linear in steps",
        (700, 700 * lowest["per_step_predicted"]),
        (900, 15 * lowest["per_step_predicted"] * 10),
        arrowprops={"arrowstyle": "->"},
        fontsize=8,
    )
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set(xlabel="step", ylabel="squared distance per element (gradients: N(0, 1))")
    axes.set_title("Drift of reduced gradients, 3 ranks (dotted: predicted)")
    axes.legend(fontsize=7)


def repairs(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        colour, parts = COLOURS[row["loss"]], row["bound"]
        many = [part["repair"] for part in parts]
        axes.plot(
            many,
            [part["predicted"] for part in parts],
            "_",
            color="black",
            markersize=24,
        )
        axes.plot(
            many,
            [part["mean"] for part in parts],
            "o",
            color=colour,
            label=f"p = {row['loss']:g}, measured",
        )
    axes.plot([], [], "_", color="black", markersize=14, label="predicted")
    axes.set_xticks(many)
    axes.set_xlim(-0.5, 2.5)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="rounds of repair", ylabel="mean over 5,000 steps, as on the left")
    axes.set_title("Where it stays with DriftBound, period 16")
    axes.legend()


def states(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Each over its mean in the second half: they differ by orders of magnitude."""
    for row, colour in zip(
        [row for row in rows if not row["period"]], ("tab:blue", "tab:orange"), strict=True
    ):
        for name, series in row["drift"].items():
            style = {"parameters": ":", "exp_avg_sq": "--"}.get(name, "-")
            axes.plot(
                row["at"],
                np.array(series) / row["halves"][name][1],
                style,
                color=colour,
                linewidth=3 if name == "momentum_buffer" else 1,  # exp_avg lies on it
                alpha=0.5 if name == "momentum_buffer" else 1,
                label=f"{row['optimizer']}: {name}",
            )
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="squared distance, mean of the second half = 1")
    axes.set_title("Trained networks, p = 0.3, without DriftBound: the state forgets")
    axes.legend(fontsize=8)


def optimizers(axes: Any, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["loss"] == 0.3]
    variants = list(dict.fromkeys((r["period"], r["repair"], r["state"]) for r in rows))
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    for i, (variant, mark) in enumerate(zip(variants, "Xosv^D", strict=True)):
        mine = [r for r in rows if (r["period"], r["repair"], r["state"]) == variant]
        period, repair, state = variant
        label = f"period {period}, repair {repair}" + (", state too" if state else "")
        axes.plot(
            [names.index(r["optimizer"]) + (i - len(variants) / 2 + 0.5) * 0.12 for r in mine],
            [r["drift"] for r in mine],
            mark,
            label=label if period else "without DriftBound",
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_yscale("log")
    axes.set_ylim(top=20 * max(row["drift"] for row in rows))  # room for the legend
    axes.set(ylabel="squared distance of replicas")
    axes.set_title("Trained networks, p = 0.3: is the state worth its bytes?")
    axes.legend(fontsize=8, ncols=2)


def one_round(axes: Any, rows: list[dict[str, Any]]) -> None:
    """By the sizes of groups; the mean's moves are near the bottom."""
    for sizes, colour in (
        ((2, 2, 2, 2), "tab:blue"),
        ((4, 4), "tab:orange"),
        ((8,), "tab:green"),
    ):
        mine = [
            {
                "loss": row["loss"],
                **{name: row[name]["value"] for name in ("variance", "moved")},
            }
            for row in rows
            if tuple(row["sizes"]) == sizes and row["grid"] != "2x2x2"
        ]
        text = f"{len(sizes)} x {sizes[0]} peers"
        against(
            axes,
            partial(formulas.variance_factor, sizes=sizes),
            mine,
            *("loss", "variance"),
            colour=colour,
            label=f"{text}: variance left",
        )
        against(
            axes,
            lambda p, sizes=sizes: formulas.one_round(p, sizes)[1],  # type: ignore[misc]
            mine,
            *("loss", "moved"),
            style="--",
            mark="^",
            colour=colour,
            label=f"{text}: the mean moves",
        )
    measured_as(axes, "o", "variance left, measured")
    measured_as(axes, "^", "the mean moves, measured")
    axes.set(xlabel="loss p", ylabel="variance before = 1")
    axes.set_ylim(top=1.25)  # room for the legend
    axes.set_title("One round in groups (lines: predicted)")
    axes.legend(fontsize=8)


ROUND_COLOURS = {0.01: "tab:green", **COLOURS}


def rounds(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Peers come to agree on a mean that isn't quite the first one."""
    for row in rows:
        if row["grid"] != "4x4" or row["peers"] != 16 or not row["loss"]:
            continue
        at, colour = range(1, len(row["variance"]) + 1), ROUND_COLOURS[row["loss"]]
        if row["wire"] != "same":
            values = [one["value"] for one in row["variance"]]
            axes.plot(at, values, "+", color=colour, label=f"p = {row['loss']:g}: {row['wire']}")
            continue
        for name, style, mark in (("variance", "-", "o"), ("moved", "--", "^")):
            text = "variance left" if name == "variance" else "the mean has moved"
            axes.plot(
                [0, *at] if name == "variance" else at,
                [1.0, *row[f"{name}_predicted"]] if name == "variance" else row["moved_predicted"],
                style,
                color=colour,
                label=f"p = {row['loss']:g}: {text}",
            )
            known = [
                (number, one["value"])
                for number, one in zip(at, row[name], strict=True)
                if one["error"] < RARE * one["value"]
            ]
            axes.plot(*zip(*known, strict=True), mark, color=colour)
    axes.set_yscale("log")
    axes.set_ylim(1e-7, 2)
    axes.set(xlabel="rounds", ylabel="variance at the beginning = 1")
    axes.set_title("Grid of 4x4, 16 peers (lines: predicted, marks: measured)")
    axes.legend(fontsize=8)

"""DropCompute's theory in figures: python -m benchmarks.theory.dropcompute

Writes docs/dropcompute-theory.json and .png, and the tables of docs/dropcompute.md; ``--tables``
does so from the figures that are there. ``--example`` writes examples/dropcompute-times.json, a
recording for ``lossycoll plan-threshold``. No network, no clock: seeded samples and formulas alone,
so the same figures on every machine. Smaller versions of all this run in CI (tests/simulate).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.pictures import panels, save
from benchmarks.common.results import ROOT, source
from benchmarks.common.tables import fill, markdown, write_json
from tests.support import dropcompute_checks as checks

JSON = ROOT / "docs" / "dropcompute-theory.json"
EXAMPLE = ROOT / "examples" / "dropcompute-times.json"
SAMPLES = 8_000_000
"""Delays that are drawn for each number of ranks."""

TOY_SEEDS = range(10)
CUTS = (8, 64, 200, 1024)
SCALES = (4, 16, 64, 256, 1024, 4096)


def measure() -> dict[str, Any]:
    maxima = [checks.maximum(workers, 400_000) for workers in checks.MAXIMA]
    speedups = [
        checks.speedup(workers, SAMPLES // (workers * checks.BATCHES), seed=workers)
        for workers in checks.SPEEDUPS
    ]
    log = {str(ranks): checks.authors_log(ranks, runs=200) for ranks in (8, 16)}
    # Seed by seed: the data of one are made once.
    runs = [
        [checks.toy(*variant, seed=seed) for variant in checks.TOY_VARIANTS] for seed in TOY_SEEDS
    ]
    toy = [average(each) for each in zip(*runs, strict=True)]
    scales = [checks.extrapolated(workers, recordings=30) for workers in SCALES]
    cuts = [checks.cuts(workers, 3_000_000 // (workers * checks.BATCHES)) for workers in CUTS]
    return {
        **{"maxima": maxima, "speedups": speedups, "log": log},
        **{"toy": toy, "scales": scales, "cuts": cuts},
    }


def average(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The toy problem's figures, the mean over its seeds."""
    means = {
        name: np.mean([run[name] for run in runs], axis=0).tolist()
        for name in ("drop_rate", "seconds", "loss", "losses")
    }
    first = runs[0]
    return {"threshold": first["threshold"], "divisor": first["divisor"], **means}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """By mark of docs/dropcompute.md."""
    maxima, toy, log = found["maxima"], found["toy"], found["log"]
    cuts = ("finished", "threshold", "started")
    scales = ("resampled", "independent", "fitted", "true", "kept")
    kinds = ("at most 10% dropped", "at most 5%")
    elsewhere = checks.SPEEDUPS

    def shares(name: str, digits: int) -> list[str]:
        """Of the log, and means and deviations of independent ranks."""
        sign = "+" if name == "gain" else ""
        drawn = [
            f"{mean:{sign}.1%} +- {std:.1%}" for mean, std in (row[name] for row in log.values())
        ]
        return [f"{checks.LOG[name]:{sign}.{digits}%}", *drawn]

    seconds = [f"{checks.LOG['threshold']:.3f}"]
    seconds += [
        f"{mean:.3f} +- {std:.3f}" for mean, std in (row["threshold"] for row in log.values())
    ]
    of_log = ["the authors' log", *(f"{ranks} independent ranks" for ranks in log)]
    cells = (seconds, shares("drop_rate", 2), shares("saved", 1), shares("gain", 1))
    return {
        "dropcompute-cuts": markdown(
            ["N", *cuts],
            [
                [str(row["workers"]), *(f"{row[k]:.3f} ({row[f'{k}_drop']:.0%})" for k in cuts)]
                for row in found["cuts"]
            ],
        ),
        "dropcompute-maxima": markdown(
            ["N", *(str(row["workers"]) for row in maxima)],
            [[key, *(f"{row[key]:.4f}" for row in maxima)] for key in ("formula", "sampled")],
        ),
        "dropcompute-speedups": markdown(
            ["N", "best", *kinds, "best, sampled", "normal formula", "elsewhere"],
            [
                [
                    str(row["workers"]),
                    *(f"{row[key]:.3f}" for key in ("exact", "exact_10", "exact_5")),
                    f"{row['sampled']:.3f} +- {row['error']:.3f}",
                    f"{row['normal']:.3f}",
                    ", ".join(f"{value:.3f}" for value in elsewhere[row["workers"]]),
                ]
                for row in found["speedups"]
            ],
        ),
        "dropcompute-log": markdown(
            ["", "threshold, s", "dropped", "compute saved", "S_eff"],
            list(zip(of_log, *cells, strict=True)),
        ),
        "dropcompute-divisors": markdown(
            ["threshold", "dropped", "time", "loss, by all", "loss, by completed"],
            [
                [
                    f"{by_all['threshold']:g}" if by_all["threshold"] else "none",
                    f"{by_all['drop_rate']:.1%}",
                    f"{by_all['seconds']:.0f} ({by_all['seconds'] / toy[0]['seconds'] - 1:+.0%})",
                    *(f"{row['loss']:.4f}" for row in (by_all, by_completed)),
                ]
                for by_completed, by_all in zip(toy[::2], toy[1::2], strict=True)
            ],
        ),
        "dropcompute-scales": markdown(
            ["N", "whole steps", "independent", "fitted", "true", "chosen threshold's"],
            [[str(row["workers"]), *(f"{row[k]:.3f}" for k in scales)] for row in found["scales"]],
        ),
    }


def report(found: dict[str, Any], folder: Path) -> None:
    """The picture, and the tables between the marks of dropcompute.md."""
    fill(folder / "dropcompute.md", tables(found))
    figure, (gain, curves, toy) = panels(3, 5, 4)
    workers = [row["workers"] for row in found["speedups"]]
    for key, label, style in (
        ("exact", "best threshold", "-"),
        ("exact_10", "at most 10% dropped", "--"),
        ("exact_5", "at most 5% dropped", ":"),
        ("normal", "best, by the normal formula", "-."),
    ):
        gain.plot(workers, [row[key] for row in found["speedups"]], style, label=label)
    gain.errorbar(
        workers,
        [row["sampled"] for row in found["speedups"]],
        [2 * row["error"] for row in found["speedups"]],
        fmt="o",
        color="black",
        markersize=4,
        label="sampled, 2 standard errors",
    )
    gain.set_xscale("log", base=2)
    gain.set_xticks(workers, [str(value) for value in workers], rotation=45)
    gain.set(xlabel="ranks", ylabel="effective speed-up")
    gain.set_title("Gain against the number of ranks")
    for ranks in (8, 64, 1024):
        points = checks.exact(ranks)
        curves.plot(
            [point.threshold / checks.STEP for point in points],
            [point.speedup for point in points],
            label=f"{ranks} ranks",
        )
    curves.axhline(1, color="black", linewidth=0.8)
    curves.set(xlabel="threshold over the mean compute of a step", ylabel="effective speed-up")
    curves.set_title("Gain against the threshold")
    for row in found["toy"]:
        full = row["threshold"] is None
        label = "no threshold" if full else f"threshold {row['threshold']:g}, {row['divisor']}"
        if full and row["divisor"] == "fixed":
            continue  # The same without a drop.
        excess = np.array(row["losses"]) - np.array(found["toy"][0]["losses"])
        toy.plot(checks.TOY_EVERY * np.arange(1, len(excess) + 1), 1000 * excess, label=label)
    toy.set(xlabel="step", ylabel="loss beyond that without a threshold, 1e-3")
    toy.set_title("What the divisor costs: logistic regression")
    for axes in (gain, curves, toy):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, folder / "dropcompute-theory.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="of the figures that are there")
    parser.add_argument("--example", action="store_true", help=f"write {EXAMPLE.name} alone")
    options = parser.parse_args()
    if options.example:
        EXAMPLE.write_text(checks.example(), encoding="utf-8")
        return
    if not options.tables:
        found = measure()
        found["measured"] = source(
            "benchmarks/theory/dropcompute.py", "tests/support/dropcompute_checks.py"
        )
        write_json(JSON, found, indent=None)
    found = json.loads(JSON.read_text(encoding="utf-8"))
    print("\n\n".join([*tables(found).values(), str(found["measured"])]))
    report(found, JSON.parent)


if __name__ == "__main__":
    main()

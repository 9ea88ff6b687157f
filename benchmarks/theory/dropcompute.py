"""DropCompute's theory in figures: python -m benchmarks.theory.dropcompute

Writes docs/dropcompute-theory.json and .png. ``--tables`` prints them as in docs/dropcompute.md,
``--example`` writes examples/dropcompute-times.json, a recording for ``lossycoll plan-threshold``.
No network, no clock: seeded samples and formulas alone, so the same figures on every machine.
Smaller versions of all this run in CI (tests/simulate).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import markdown, plt, save, write_json
from benchmarks.common.results import ROOT, source
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


def tables(found: dict[str, Any]) -> Iterator[str]:
    """In markdown, in the order of docs/dropcompute.md."""
    yield markdown(
        ["N", "E[max], formula", "sampled", "off"],
        [
            [
                str(row["workers"]),
                f"{row['formula']:.4f}",
                f"{row['sampled']:.4f}",
                f"{row['formula'] / row['sampled'] - 1:+.2%}",
            ]
            for row in found["maxima"]
        ],
    )
    yield markdown(
        ["N", "best", "drop <= 10%", "drop <= 5%", "sampled, best", "normal formula", "elsewhere"],
        [
            [
                str(row["workers"]),
                *(f"{row[key]:.3f}" for key in ("exact", "exact_10", "exact_5")),
                f"{row['sampled']:.3f} +- {row['error']:.3f}",
                f"{row['normal']:.3f}",
                ", ".join(f"{value:.3f}" for value in checks.SPEEDUPS[row["workers"]]),
            ]
            for row in found["speedups"]
        ],
    )
    streams = [
        [f"{ranks} streams", *(f"{mean:.4f} +- {std:.4f}" for mean, std in row.values())]
        for ranks, row in found["log"].items()
    ]
    yield markdown(
        ["", "threshold, s", "dropped", "compute saved", "S_eff"],
        [["authors' log", *map(str, checks.LOG.values())], *streams],
    )
    yield markdown(
        ["threshold", "divisor", "dropped", "time", "loss"],
        [
            [
                *(str(row[key]) for key in ("threshold", "divisor")),
                f"{row['drop_rate']:.1%}",
                f"{row['seconds']:.0f}",
                f"{row['loss']:.4f}",
            ]
            for row in found["toy"]
        ],
    )
    scales = ("resampled", "independent", "fitted", "true", "kept")
    rows = [[str(row["workers"]), *(f"{row[k]:.3f}" for k in scales)] for row in found["scales"]]
    yield markdown(["workers", *scales], rows)
    cuts = ("finished", "threshold", "started")
    yield markdown(
        ["N", *cuts],
        [
            [str(row["workers"]), *(f"{row[k]:.3f} ({row[f'{k}_drop']:.0%})" for k in cuts)]
            for row in found["cuts"]
        ],
    )


def report(found: dict[str, Any], folder: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    gain, curves, toy, empty = axes.flat
    empty.set_visible(False)
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
    parser.add_argument("--tables", action="store_true", help="print the figures that are there")
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
    print("\n\n".join([*tables(found), str(found["measured"])]))
    report(found, JSON.parent)


if __name__ == "__main__":
    main()

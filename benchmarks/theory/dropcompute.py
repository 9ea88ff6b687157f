"""DropCompute's theory in figures: python -m benchmarks.theory.dropcompute

Writes docs/dropcompute-theory.json and .png. ``--tables`` prints them as in docs/dropcompute.md,
``--example`` writes examples/dropcompute-times.json, a recording for ``lossycoll plan-threshold``.
No network, no clock: seeded samples and formulas alone, so the same figures on every machine.
Smaller versions of all this run in CI (tests/simulate/test_threshold.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common.results import commit  # noqa: E402
from tests.support import dropcompute_checks as checks  # noqa: E402

JSON = ROOT / "docs" / "dropcompute-theory.json"
PICTURE = JSON.with_suffix(".png")
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
    runs = [[checks.toy(*arm, seed=seed) for arm in checks.TOY_ARMS] for seed in TOY_SEEDS]
    toy = [average(arm) for arm in zip(*runs, strict=True)]
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


def tables(found: dict[str, Any]) -> None:
    def table(head: str, rows: list[list[Any]]) -> None:
        print(f"\n{head}\n|{'---|' * (head.count('|') - 1)}")
        for row in rows:
            print("| " + " | ".join(str(value) for value in row) + " |")

    table(
        "| N | E[max], formula | sampled | off |",
        [[row["workers"], f"{row['formula']:.4f}", f"{row['sampled']:.4f}",
          f"{row['formula'] / row['sampled'] - 1:+.2%}"] for row in found["maxima"]],
    )  # fmt: skip
    table(
        "| N | best | drop <= 10% | drop <= 5% | sampled, best | normal formula | elsewhere |",
        [[row["workers"], *(f"{row[key]:.3f}" for key in ("exact", "exact_10", "exact_5")),
          f"{row['sampled']:.3f} +- {row['error']:.3f}", f"{row['normal']:.3f}",
          ", ".join(f"{value:.3f}" for value in checks.SPEEDUPS[row["workers"]])]
         for row in found["speedups"]],
    )  # fmt: skip
    table(
        "| | threshold, s | dropped | compute saved | S_eff |",
        [["authors' log", *checks.LOG.values()]]
        + [[f"{ranks} streams", *(f"{mean:.4f} +- {std:.4f}" for mean, std in row.values())]
           for ranks, row in found["log"].items()],
    )  # fmt: skip
    table(
        "| threshold | divisor | dropped | time | loss |",
        [[row["threshold"], row["divisor"], f"{row['drop_rate']:.1%}", f"{row['seconds']:.0f}",
          f"{row['loss']:.4f}"] for row in found["toy"]],
    )  # fmt: skip
    keys = ("workers", "resampled", "independent", "fitted", "true", "kept")
    table(
        "| " + " | ".join(keys) + " |",
        [[row["workers"], *(f"{row[key]:.3f}" for key in keys[1:])] for row in found["scales"]],
    )
    keys = ("finished", "threshold", "started")
    table(
        "| N | " + " | ".join(keys) + " |",
        [[row["workers"], *(f"{row[key]:.3f} ({row[f'{key}_drop']:.0%})" for key in keys)]
         for row in found["cuts"]],
    )  # fmt: skip
    print(found["measured"])


def draw(found: dict[str, Any]) -> None:
    figure, (gain, curves, toy) = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
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
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


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
        found["measured"] = {
            "date": datetime.date.today().isoformat(),
            "commit": commit("theory/dropcompute.py", "tests/support/dropcompute_checks.py"),
            "machine": f"{os.cpu_count()} cores, {os.uname().machine}",
        }
        JSON.write_text(json.dumps(found) + "\n", encoding="utf-8")
    found = json.loads(JSON.read_text(encoding="utf-8"))
    tables(found)
    draw(found)


if __name__ == "__main__":
    main()

"""The benchmark's picture: bandwidth and time over size, and how times are spread at each size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"lossy": "tab:red", "gloo": "tab:blue"}


def draw(results: dict[str, Any], human: Callable[[int], str], path: Path) -> None:
    """``results``: bench.summarize's, with the seconds of each row; ``human`` names a size."""
    figure, (bandwidth, time, spread) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        rows.setdefault(row["backend"], []).append(row)
    for name, own in rows.items():
        sizes = [row["bytes"] for row in own]
        style = {"color": COLOURS[name], "label": name}
        bandwidth.plot(sizes, [row["busbw_gb_s"] for row in own], "o-", **style)
        medians = [row["median_ms"] for row in own]
        time.plot(sizes, medians, "o-", **style)
        longest = [row["p99_ms"] for row in own]
        time.fill_between(sizes, medians, longest, alpha=0.2, color=COLOURS[name])
        _spread(spread, own[-1], COLOURS[name])
    chosen = results["options"]
    loss = f", {chosen['loss']:.1%} lost" if chosen["loss"] else ""
    figure.suptitle(f"all-reduce, {chosen['ranks']} ranks, {chosen['dtype']}{loss}")
    largest = max(row["bytes"] for row in results["rows"])
    bandwidth.set_ylabel("bus bandwidth, GB/s")
    bandwidth.set_ylim(bottom=0)
    time.set_ylabel("ms: median, and up to the 99th percentile")
    time.set_yscale("log")
    for axis in (bandwidth, time):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["bytes"] for row in results["rows"]}))
        axis.xaxis.set_major_formatter(lambda size, _: human(int(size)))
        axis.set_xlabel("size")
        axis.tick_params(axis="x", labelrotation=45)
        axis.legend()
    spread.set_xlabel(f"ms, at {human(largest)}")
    spread.set_ylabel("share of iterations that took less")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _spread(axis: Axes, row: dict[str, Any], colour: str) -> None:
    times = sorted(1e3 * seconds for seconds in row["seconds"])
    shares = [(i + 1) / len(times) for i in range(len(times))]
    axis.step(times, shares, where="post", color=colour, label=row["backend"])

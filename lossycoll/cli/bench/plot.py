"""The benchmark's picture: bandwidth and time over size, time over loss, and how times spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter

from lossycoll.cli.argtypes import human

COLOURS = {"lossy": "tab:red", "gloo": "tab:blue", "nccl": "tab:green"}


def draw(plt: Any, results: dict[str, Any], path: Path) -> None:
    """``results``: bench.summarize's, with the seconds of each row and ``loss``, what
    against_loss found, or None."""
    rows = 1 if results["loss"] is None else 2
    figure, axes = plt.subplots(rows, 3, figsize=(15, 4.2 * rows), squeeze=False)
    bandwidth, time, spread = axes[0]
    sizes = sorted({row["bytes"] for row in results["rows"]})
    _over(bandwidth, results["rows"], "bytes", "busbw_gb_s")
    _over(time, results["rows"], "bytes", "median_ms", "p99_ms")
    bandwidth.set(title="Bus bandwidth", ylabel="GB/s", ylim=(0, None))
    _plain_log(time.yaxis, "ms")
    time.set_title("Time: median, and up to the 99th percentile")
    for axis in (bandwidth, time):
        axis.set_xscale("log", base=2)
        # A label at each would run into the next.
        shown = sizes[:: -(-len(sizes) // 9)]
        axis.set_xticks(shown, [human(size) for size in shown], rotation=45)
        axis.set_xticks(sizes, [""] * len(sizes), minor=True)
        axis.set_xlabel("size")
    _spread(spread, {row["backend"]: row["seconds"] for row in results["rows"]})
    spread.set_title(f"All-reduces of {human(sizes[-1])}")
    chosen = results["options"]
    lost = f", {chosen['loss']:.1%} lost on purpose" if chosen["loss"] else ""
    title = f"All-reduce, {chosen['ranks']} ranks, {chosen['dtype']}. Above: this machine{lost}."
    if results["loss"] is not None:
        _draw_loss(results["loss"], *axes[1])
        title += f" Below: {results['loss']['network']}."
    figure.suptitle(title)
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.savefig(path)


def _draw_loss(found: dict[str, Any], time: Axes, spread: Axes, steps: Axes) -> None:
    losses = sorted({row["loss"] for row in found["rows"]})
    rows = [{**row, "percent": 100 * row["loss"]} for row in found["rows"]]
    _over(time, rows, "percent", "median_ms", "p99_ms")
    # Linear up to the smallest loss, so that none has a place too.
    least = 100 * min([loss for loss in losses if loss] or [0.01])
    time.set_xscale("symlog", linthresh=least)
    ticks = [100 * loss for loss in losses]
    time.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    time.set_xticks([], minor=True)
    time.set(xlabel="packets lost, %", xlim=(-0.15 * least, None))
    _plain_log(time.yaxis, "ms")
    time.set_title(f"Time of {human(found['bytes'])}: median, and up to the 99th percentile")
    at = found["steps"]["loss"]
    _spread(spread, {row["backend"]: row["seconds"] for row in rows if row["loss"] == at})
    spread.set_title(f"All-reduces of {human(found['bytes'])}, {100 * at:g}% lost")
    _spread(steps, found["steps"]["seconds"])
    steps.set_title(f"Steps of training under DDP, {100 * at:g}% lost")


def _over(
    axis: Axes, rows: Sequence[dict[str, Any]], across: str, up: str, longest: str | None = None
) -> None:
    """A line for each backend, and the room up to ``longest`` shaded."""
    for name in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == name]
        x = [row[across] for row in own]
        y = [row[up] for row in own]
        axis.plot(x, y, "o-", markersize=4, color=COLOURS[name], label=name)
        if longest is not None:
            top = [row[longest] for row in own]
            axis.fill_between(x, y, top, alpha=0.15, color=COLOURS[name])


def _spread(axis: Axes, seconds: dict[str, list[float]]) -> None:
    """The share of times up to each; of rows of one backend, the last."""
    for name, times in seconds.items():
        label = f"{name}, {len(times)} times"
        axis.ecdf([1e3 * one for one in times], color=COLOURS[name], label=label)
    _plain_log(axis.xaxis, "ms")
    axis.set(ylim=(0, 1), ylabel="share that took less")


def _plain_log(axis: Axis, unit: str) -> None:
    """A logarithmic axis with plain numbers: 1, 2, 5, 10, as many as there is room for."""
    axis.axes.set(**{"xscale" if axis is axis.axes.xaxis else "yscale": "log"})
    low, high = axis.get_view_interval()
    # Over a decade or two; else powers of ten are enough.
    steps: tuple[float, ...] = (1, 2, 5) if high / low < 1e3 else (1,)
    if high / low < 4:
        steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(unit)

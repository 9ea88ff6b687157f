"""The table and the plot of the bad wires."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result
from benchmarks.common.tables import markdown, publish

from .cells import VARIANTS, Cell

COLOURS = dict(
    zip(VARIANTS, ("tab:red", "tab:orange", "tab:green", "tab:blue", "tab:cyan"), strict=True)
)
LEFT_OUT = 1 / 3
"""Of each series: the first operations find the path's rate."""


def after_start(entry: Result, variant: str) -> list[float]:
    times: list[float] = entry.figures["seconds"][variant]
    return times[int(len(times) * LEFT_OUT) :]


def median(entry: Result, variant: str) -> float:
    return statistics.median(after_start(entry, variant))


def write(entries: Sequence[Result], folder: Path) -> None:
    """wire.json, wire.png, and the table between the marks of performance.md."""
    found, text = [asdict(entry) for entry in entries], {"wire": table(entries)}
    publish(folder, "wire", found, "performance.md", text, partial(draw, entries))


def table(entries: Sequence[Result]) -> str:
    head = ["network", "limit, ms", "lossy", "against the limit", "longest / median", "missing"]
    head += ["repair=1", "reliable", "gloo", "gloo, bbr", "gloo / lossy", "gloo / reliable"]
    rows = []
    for entry in sorted(entries, key=lambda entry: tuple(entry.settings.values())):
        cell = Cell.of(entry.settings)
        ms = {variant: 1e3 * median(entry, variant) for variant in entry.figures["seconds"]}
        gloo = min((ms[variant] for variant in ("gloo", "gloo-bbr") if variant in ms), default=0.0)
        rows.append(
            [
                cell.name,
                f"{1e3 * cell.limit:.0f}",
                f"{ms['lossy']:.0f}",
                f"{ms['lossy'] / (1e3 * cell.limit):.2f}",
                f"{1e3 * max(after_start(entry, 'lossy')) / ms['lossy']:.2f}",
                f"{entry.figures['missing']['lossy']:.2%}",
                f"{ms['repair']:.0f}" if "repair" in ms else "-",
                f"{ms['reliable']:.0f}" if "reliable" in ms else "-",
                f"{ms['gloo']:.0f}" if "gloo" in ms else "-",
                f"{ms['gloo-bbr']:.0f}" if "gloo-bbr" in ms else "-",
                f"{gloo / ms['lossy']:.1f}x" if gloo else "-",
                f"{gloo / ms['reliable']:.1f}x" if gloo and "reliable" in ms else "-",
            ]
        )
    return markdown(head, rows)


def _band(axis: Any, found: Sequence[Result], variant: str) -> None:
    """From the fastest to the slowest call that counts."""
    ended = [entry for entry in found if entry.figures["seconds"].get(variant)]
    counted = [after_start(entry, variant) for entry in ended]
    x = [100 * entry.settings["loss"] for entry in ended]
    low, high = [min(times) for times in counted], [max(times) for times in counted]
    axis.fill_between(x, low, high, color=COLOURS[variant], alpha=0.15, linewidth=0)


def draw(entries: Sequence[Result], path: Path) -> None:
    """Time of all-reduces against loss, single losses, one panel for each network and size:
    medians, and bands from the fastest to the slowest."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for entry in entries:
        cell = Cell.of(entry.settings)
        if cell.burst == 1 and cell.what == "all-reduce":
            groups.setdefault((cell.hosts, cell.mbit, cell.mib, cell.rtt_ms), []).append(entry)
    shown = {key: found for key, found in sorted(groups.items()) if len(found) > 1}
    if not shown:
        return
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    size = (4.6 * columns, 3.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, ((hosts, mbit, mib, rtt_ms), found) in zip(axes.flat, shown.items(), strict=False):
        found.sort(key=lambda entry: entry.settings["loss"])
        x = [100 * entry.settings["loss"] for entry in found]
        for variant in VARIANTS:
            ended = [
                (at, median(e, variant))
                for at, e in zip(x, found, strict=True)
                if e.figures["seconds"].get(variant)
            ]
            if ended:
                axis.plot(*zip(*ended, strict=True), "o-", color=COLOURS[variant], label=variant)
                _band(axis, found, variant)
        limit = found[0].figures["limit"]
        axis.axhline(limit, color="black", linestyle=":", label="limit of the link")
        axis.set_yscale("log")
        axis.set_title(f"{mib:.3g} MiB, {hosts} hosts, {mbit:g} Mbit/s, {rtt_ms:g} ms", fontsize=10)
        axis.set_xlabel("packets lost, %")
        axis.set_ylabel("all-reduce, s")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), fontsize=9, ncols=6, loc="outside lower center"
    )
    save(figure, path)

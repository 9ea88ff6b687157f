"""The table and the plot of the bad wires."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from benchmarks.studies.quality.report import between, markdown

from .cells import WAYS, Cell

COLOURS = dict(
    zip(WAYS, ("tab:red", "tab:orange", "tab:green", "tab:blue", "tab:cyan"), strict=True)
)
LEFT_OUT = 1 / 3
"""Of each series: the first operations find the path's rate."""


def settled(entry: dict[str, Any], way: str) -> list[float]:
    times = entry["seconds"][way]
    return times[int(len(times) * LEFT_OUT) :]


def median(entry: dict[str, Any], way: str) -> float:
    return statistics.median(settled(entry, way))


def write(entries: Sequence[dict[str, Any]], folder: Path) -> None:
    """wire.json, wire.png, and the table between the marks of performance.md."""
    (folder / "wire.json").write_text(json.dumps(list(entries), indent=1) + "\n")
    page = folder / "performance.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(between(text, "wire", table(entries)), encoding="utf-8")
    draw(entries, folder / "wire.png")


def table(entries: Sequence[dict[str, Any]]) -> str:
    head = ["network", "limit, ms", "lossy", "against the limit", "longest / median", "missing"]
    head += ["repair=1", "reliable", "gloo", "gloo, bbr", "gloo / lossy", "gloo / reliable"]
    rows = []
    for entry in sorted(entries, key=lambda entry: tuple(entry["cell"].values())):
        cell = Cell(**entry["cell"])
        ms = {way: 1e3 * median(entry, way) for way in entry["seconds"]}
        gloo = min((ms[way] for way in ("gloo", "gloo-bbr") if way in ms), default=0.0)
        rows.append(
            [
                cell.name,
                f"{1e3 * cell.limit:.0f}",
                f"{ms['lossy']:.0f}",
                f"{ms['lossy'] / (1e3 * cell.limit):.2f}",
                f"{1e3 * max(settled(entry, 'lossy')) / ms['lossy']:.2f}",
                f"{entry['missing']['lossy']:.2%}",
                f"{ms['repair']:.0f}",
                f"{ms['reliable']:.0f}",
                f"{ms['gloo']:.0f}" if "gloo" in ms else "-",
                f"{ms['gloo-bbr']:.0f}" if "gloo-bbr" in ms else "-",
                f"{gloo / ms['lossy']:.1f}x" if gloo else "-",
                f"{gloo / ms['reliable']:.1f}x" if gloo else "-",
            ]
        )
    return markdown(head, rows)


def draw(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Time against loss, single losses, one panel for each network and size."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        cell = Cell(**entry["cell"])
        if cell.burst == 1:
            groups.setdefault((cell.hosts, cell.mbit, cell.mib, cell.rtt_ms, cell.what), []).append(
                entry
            )
    shown = {key: found for key, found in sorted(groups.items()) if len(found) > 1}
    if not shown:
        return
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    size = (4.6 * columns, 3.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, ((hosts, mbit, mib, rtt_ms, what), found) in zip(
        axes.flat, shown.items(), strict=False
    ):
        found.sort(key=lambda entry: entry["cell"]["loss"])
        x = [100 * entry["cell"]["loss"] for entry in found]
        for way in WAYS:
            ended = [
                (at, median(e, way))
                for at, e in zip(x, found, strict=True)
                if e["seconds"].get(way)
            ]
            if ended:
                axis.plot(*zip(*ended, strict=True), "o-", color=COLOURS[way], label=way)
        axis.axhline(found[0]["limit"], color="black", linestyle=":", label="limit of the link")
        axis.set_yscale("log")
        axis.set_title(
            f"{what}, {mib:.3g} MiB, {hosts} hosts, {mbit:g} Mbit/s, {rtt_ms:g} ms", fontsize=9
        )
        axis.set_xlabel("packets lost, %")
        axis.set_ylabel("all-reduce, s")
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

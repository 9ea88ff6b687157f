"""Bus bandwidth of all-reduce over size, a panel for each of two wires and number of ranks: the
median call, and a band to the tenth of the calls that are slowest and fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result
from lossycoll.cli.argtypes import human
from lossycoll.cli.bench.plot import COLOURS

from .cells import RANKS, RAW_BASE, WIRES
from .verdict import bus

SHOWN = tuple(WIRES)[:2]
"""The others are in the tables."""


def draw(entries: Sequence[Result], path: Path) -> None:
    """``entries``: lines of the results. Nothing is drawn before collectives were measured."""
    found = {(e.settings["part"], e.settings["ranks"], e.settings["wire"]): e for e in entries}
    if not any(part == "collectives" for part, _, _ in found):
        return
    size = (4.4 * len(SHOWN), 3.2 * len(RANKS) + 0.4)
    figure, axes = plt.subplots(
        len(RANKS), len(SHOWN), figsize=size, layout="constrained", squeeze=False, sharey="row"
    )
    for line, ranks in zip(axes, RANKS, strict=True):
        for axis, wire in zip(line, SHOWN, strict=True):
            axis.set_title(f"{wire}, {ranks} ranks", fontsize=10)
            entry = found.get(("collectives", ranks, wire))
            if entry is None:
                continue
            rows = [row for row in entry.figures["rows"] if row["collective"] == "all_reduce"]
            x = [row["bytes"] for row in rows]
            for variant in rows[0]["variants"]:
                low, y, high = (
                    [bus(entry, row, variant, share) for row in rows]
                    for share in ("p90", "p50", "p10")
                )
                axis.plot(x, y, "o-", color=COLOURS[variant], label=variant)
                axis.fill_between(x, low, high, color=COLOURS[variant], alpha=0.15, linewidth=0)
            raw = found.get(("raw", ranks, wire))
            if raw is not None:
                rate = raw.figures["raw"][RAW_BASE]["gb_per_s"]
                axis.axhline(rate, color="black", linestyle=":", label="bare sockets")
            axis.set_xscale("log", base=2)
            axis.set_xticks(x)
            axis.xaxis.set_major_formatter(lambda size, _: human(int(size)))
            axis.tick_params(axis="x", labelrotation=45)
            axis.set_ylim(bottom=0)
    named = axes[0][0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=3, fontsize=9)
    for line in axes:
        line[0].set_ylabel("bus bandwidth, GB/s")
    for axis in axes[-1]:
        axis.set_xlabel("size of the tensor")
    save(figure, path)

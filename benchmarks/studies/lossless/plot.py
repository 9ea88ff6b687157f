"""Bus bandwidth of all-reduce over size, a panel for each wire and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from lossycoll.cli.bench.command import human
from lossycoll.cli.bench.plot import COLOURS

from .cells import RANKS, RAW_BASE, WIRES
from .rates import bus


def draw(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """``entries``: lines of the results. Nothing is drawn before collectives were measured."""
    found = {(e["job"]["part"], e["job"]["ranks"], e["job"]["wire"]): e for e in entries}
    if not any(part == "collectives" for part, _, _ in found):
        return
    size = (4.4 * len(WIRES), 3.2 * len(RANKS))
    figure, axes = plt.subplots(
        len(RANKS), len(WIRES), figsize=size, layout="constrained", squeeze=False, sharey="row"
    )
    for line, ranks in zip(axes, RANKS, strict=True):
        for axis, wire in zip(line, WIRES, strict=True):
            axis.set_title(f"{wire}, {ranks} ranks", fontsize=10)
            entry = found.get(("collectives", ranks, wire))
            if entry is None:
                continue
            rows = [row for row in entry["found"]["rows"] if row["collective"] == "all_reduce"]
            x = [row["bytes"] for row in rows]
            for way in rows[0]["ways"]:
                y = [bus(entry, row, way) for row in rows]
                axis.plot(x, y, "o-", color=COLOURS[way], label=way)
            raw = found.get(("raw", ranks, wire))
            if raw is not None:
                rate = raw["found"]["raw"][RAW_BASE]["gb_per_s"]
                axis.axhline(rate, color="black", linestyle=":", label="bare sockets")
            axis.set_xscale("log", base=2)
            axis.set_xticks(x)
            axis.xaxis.set_major_formatter(lambda size, _: human(int(size)))
            axis.tick_params(axis="x", labelrotation=45)
            axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    for line in axes:
        line[0].set_ylabel("bus bandwidth, GB/s")
    figure.savefig(path, dpi=110)
    plt.close(figure)

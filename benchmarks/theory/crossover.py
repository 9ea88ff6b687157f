"""Parity against resending, by round trip and loss: ``python -m benchmarks.theory.crossover docs``.

Draws parity-map.png, and fills the table of parity-speed.md: the round trip from which on parity
alone takes less time than resending alone. Pure arithmetic, by the engine's own model of a stream.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common.pictures import plt, save
from benchmarks.common.tables import fill_and_keep, markdown
from tests.oracle.recovery import NO_PARITY, Ask, Means, choose

LOSSES: Final = (0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4)
BURSTS: Final = (1.0, 8.0)
STREAMS: Final = (192, 3000, 72_000)
"""Packets: of 270 KB, 4 MB and 100 MB."""
ROUND_TRIPS: Final = np.geomspace(1e-4, 0.2, 45)
"""Seconds: from a rack to half of the world."""


def alone(ask: Ask, *, parity: bool) -> Means:
    """What is chosen if only parity may be used, or only resending."""
    how: dict[str, Any] = {"rounds": 0} if parity else {"code": NO_PARITY}
    return choose(Ask(**{**vars(ask), **how}))


def enough(means: Means, ask: Ask) -> bool:
    return ask.max_missing is not None and means.expected <= ask.max_missing * (1 + 1e-6)


def times(packets: int, loss: float, burst: float, trips: Sequence[float]) -> list[float]:
    """By round trip: the time that resending adds to a stream over the time that parity adds.

    NaN where parity alone leaves too much. Parity waits for nothing, so its time is found once.
    """
    asks = [Ask(packets, loss=loss, burst=burst, rtt_s=trip) for trip in trips]
    code = alone(asks[0], parity=True)
    if not enough(code, asks[0]):
        return [math.nan] * len(asks)
    return [alone(ask, parity=False).seconds / max(code.seconds, 1e-9) for ask in asks]


def crossover(found: Sequence[float], trips: Sequence[float]) -> float | None:
    """The first round trip, in seconds, from which on parity takes less time; None: none is."""
    there = [trip for trip, ratio in zip(trips, found, strict=True) if ratio >= 1]
    return there[0] if there else None


Map = dict[tuple[int, float, float], list[float]]
"""By packets, burst and loss."""


def measured() -> Map:
    return {
        (packets, burst, loss): times(packets, loss, burst, list(ROUND_TRIPS))
        for packets in STREAMS
        for burst in BURSTS
        for loss in LOSSES
    }


def draw(found: Map, path: Path) -> None:
    """A map for each burst and each stream but the shortest, where parity is sooner anyway."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 7), layout="constrained", sharex=True)
    losses = 100 * np.array(LOSSES)
    for packets, row in zip(STREAMS[1:], axes, strict=True):
        for burst, axis in zip(BURSTS, row, strict=True):
            ratios = np.array([found[packets, burst, loss] for loss in LOSSES])
            logs = np.ma.masked_invalid(np.log10(ratios))
            axis.set_facecolor("0.8")
            shade = axis.pcolormesh(
                *(1e3 * ROUND_TRIPS, losses, logs),
                **{"cmap": "PuOr_r", "vmin": -1.5, "vmax": 1.5, "shading": "nearest"},
            )
            if logs.count():
                axis.contour(1e3 * ROUND_TRIPS, losses, logs, [0.0], colors="black", linewidths=2)
            kind = "single losses" if burst == 1 else f"bursts of {burst:.0f}"
            axis.set(xscale="log", yscale="log", title=f"{packets:,} packets, {kind}")
            ticks = (2, 5, 10, 20, 40)
            axis.set_yticks(ticks, [f"{tick}%" for tick in ticks])
            axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("round trip, ms")
    for axis in axes[:, 0]:
        axis.set_ylabel("packets lost")
    bar = figure.colorbar(shade, ax=axes, location="bottom", aspect=50, shrink=0.9)
    bar.set_ticks([-1, 0, 1], labels=["resending 10 times", "as long", "parity 10 times"])
    bar.set_label("which takes less time; grey: parity alone leaves more than 1%")
    save(figure, path, dpi=110)


def table(found: Map) -> str:
    """Round trips in ms from which on parity takes less time."""
    trips = list(ROUND_TRIPS)

    def cell(of: tuple[int, float, float]) -> str:
        if math.isnan(found[of][0]):
            return "never: too much is left"
        at = crossover(found[of], trips)
        if at is None:
            return f"above {1e3 * trips[-1]:.0f}"
        return "any" if at == trips[0] else f"{1e3 * at:.2g}"

    streams = [(packets, burst) for packets in STREAMS for burst in BURSTS]
    lines = [
        [f"{100 * loss:g}%", *(cell((*stream, loss)) for stream in streams)] for loss in LOSSES
    ]
    head = [f"{packets:,} packets, bursts of {burst:.0f}" for packets, burst in streams]
    return markdown(["lost", *head], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of parity-speed.md")
    folder = parser.parse_args().folder
    found = measured()
    draw(found, folder / "parity-map.png")
    fill_and_keep(folder / "parity-speed.md", "parity-map", table(found))


if __name__ == "__main__":
    main()

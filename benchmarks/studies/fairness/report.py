"""sharing.json, sharing.png and the table between the marks of congestion-results.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result
from benchmarks.common.tables import markdown, publish

from .contests import MBIT, Contest
from .flow import Samples


def write(entries: Sequence[Result], folder: Path) -> None:
    found, text = [asdict(entry) for entry in entries], {"sharing": table(entries)}
    publish(folder, "sharing", found, "congestion-results.md", text, partial(draw, entries))


def shares(entry: Result) -> tuple[float, float]:
    """Mbit/s of both, over the last two thirds of the time in which both sent."""
    first, second = entry.figures["samples"]
    begin, end = second[0][0], min(first[-1][0], second[-1][0])
    begin += (end - begin) / 3
    return rate(first, begin, end), rate(second, begin, end)


def rate(samples: Samples, begin: float, end: float) -> float:
    within = [(when, total) for when, total in samples if begin <= when <= end]
    (first, least), (last, most) = within[0], within[-1]
    return (most - least) * 8e-6 / (last - first)


def cells_of(entry: Result) -> list[str]:
    first, second = shares(entry)
    contest = Contest.of(entry.settings)
    both = first + second
    return [
        contest.name,
        f"{first:.0f}",
        f"{second:.0f}",
        f"{first / both:.0%}",
        f"{both / MBIT:.0%}",
        f"{entry.figures['queue_drops']:.2%}",
    ]


def table(found: Sequence[Result]) -> str:
    head = ["a job beside", "its Mbit/s", "the other's", "its share", "of the link", "queue drops"]
    return markdown(head, [cells_of(entry) for entry in found])


def draw(found: Sequence[Result], path: Path) -> None:
    """Rates over time, one panel for each contest."""
    size = (9.5, 5.6)
    figure, axes = plt.subplots(2, 2, figsize=size, layout="constrained", sharey=True)
    for axis, entry in zip(axes.flat, found, strict=True):
        begin = entry.figures["samples"][0][0][0]
        names = ("a lossy job", Contest(entry.settings["beside"], 0.0).name)
        for samples, colour, name in zip(
            entry.figures["samples"], ("tab:red", "tab:blue"), names, strict=True
        ):
            x, y = zip(*smoothed(samples), strict=True)
            axis.plot([when - begin for when in x], y, color=colour, label=name)
        axis.axhline(MBIT, color="black", linestyle=":", linewidth=1, label="the link's rate")
        axis.set_title(Contest.of(entry.settings).name, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylabel("Mbit/s received")
        axis.set_ylim(0, 1.35 * MBIT)  # room for the legend
        axis.legend(fontsize=8, loc="upper center", ncols=3)
    save(figure, path)


def smoothed(samples: Samples) -> list[tuple[float, float]]:
    """Rates over two seconds: bytes of a job are counted when its operations end."""
    out = []
    first = 0
    for when, total in samples:
        while when - samples[first][0] > 2:
            first += 1
        begin, before = samples[first]
        if when - begin > 1:
            out.append(((when + begin) / 2, (total - before) * 8e-6 / (when - begin)))
    return out

"""swarm-preempted.json, the picture, and what stands between the marks of moshpit.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result, one_budget
from benchmarks.common.tables import markdown, publish

from .runs import SPEEDS, VARIANTS, Budget, Run

NAME: Final = "swarm-preempted"
GOAL: Final = 2.5
"""The validation loss whose time is told, in nats per byte. Each seed has texts of its own, some of
which are harder."""
REFERENCE: Final = next(iter(VARIANTS))
"""The variant with whose time the others' is compared, seed by seed."""
WINDOW: Final = 18.0
"""It is the mean after the rounds of so many seconds, as the rate stays and single losses are off
by 0.03. As many for all, however long their rounds are."""
COLOURS: Final = dict(
    zip(
        VARIANTS,
        ("tab:blue", "tab:cyan", "tab:red", "tab:green", "tab:purple", "tab:pink"),
        strict=True,
    )
)


def check(figures: Mapping[str, Any]) -> None:
    """Raises ValueError for a curve that goes back in time, or a loss that is no number above 0."""
    curve = figures["curve"]
    if not curve:
        raise ValueError("a curve of no points")
    if any(before[0] >= after[0] for before, after in pairwise(curve)):
        raise ValueError("a curve goes back in time")
    for loss in (*(point[1] for point in curve), *figures["losses"]):
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(f"a loss of {loss}")


def reached(curve: Sequence[Sequence[float]], goal: float = GOAL) -> float | None:
    """Seconds until the mean of the latest rounds' losses is as low; None where it never is."""
    return next((at for at, loss in smooth(curve) if loss <= goal), None)


def smooth(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The mean of the latest rounds' losses by time."""
    return [
        (at, statistics.fmean(loss for then, loss in curve if at - WINDOW < then <= at))
        for at, _ in curve
    ]


def results(entries: Sequence[Result]) -> dict[str, Any]:
    """By variant, with lists by seed. Raises ValueError for figures that make no sense, and for
    runs of more than one budget."""
    told = one_budget(entries)
    budget = Budget(**told)
    variants: dict[str, dict[str, Any]] = {}
    for one in sorted(entries, key=lambda one: int(one.settings["seed"])):
        run, figures = Run.of(one.settings), one.figures
        check(figures)
        of = variants.setdefault(run.variant, {})
        for name, value in {
            "seed": run.seed,
            "seconds": reached(figures["curve"]),
            "loss": smooth(figures["curve"])[-1][1],
            "taken": sum(figures["steps"]) * budget.step / sum(SPEEDS) / budget.seconds,
            "rounds": figures["rounds"],
            "members": figures["members"],
            "failed": figures["failed"],
            "back": [seconds for _, _, seconds in figures["back"]],
            "preempted": len(figures["preempted"]),
            "crashes": len(figures["crashes"]),
            "bytes": figures["bytes"],
            "load": figures["load"],
            "curve": figures["curve"],
            "date": one.date,
        }.items():
            of.setdefault(name, []).append(value)
    reference = variants.get(REFERENCE, {"seed": [], "seconds": []})
    times = dict(zip(reference["seed"], reference["seconds"], strict=True))
    for of in variants.values():
        pairs = zip(of["seconds"], map(times.get, of["seed"]), strict=True)
        of["against"] = [a / b if a and b else None for a, b in pairs]
    ordered = {name: variants[name] for name in VARIANTS if name in variants}
    commits = sorted({one.commit for one in entries})
    return {"budget": told, "commits": commits, "variants": ordered}


def _spread(values: Sequence[float], form: str) -> str:
    least, most = (format(one, form) for one in (min(values), max(values)))
    return f"{statistics.median(values):{form}} ({least}, {most})"


def _known(values: Sequence[float | None], form: str) -> str:
    """The spread, or how many seeds have a value."""
    known = [one for one in values if one is not None]
    if len(known) < len(values):
        some = f": {', '.join(format(one, form) for one in known)}" if known else ""
        return f"{len(known)} of {len(values)} seeds{some}"
    return _spread(known, form)


def table(found: Mapping[str, Any]) -> str:
    """A line for each variant."""
    head = [
        "variant",
        "seeds",
        f"seconds to a loss of {GOAL:g}: median (least, most)",
        f"times as long as `{REFERENCE}`",
        "loss at the end",
        "steps taken, of those possible",
        "rounds of peer 0",
        "members",
        "rounds that failed",
        "trains again after, s: median, longest",
        "MiB of all",
    ]
    rows = []
    for name, of in found["variants"].items():
        back = [seconds for one in of["back"] for seconds in one]
        rows.append(
            [
                name,
                ", ".join(map(str, of["seed"])),
                _known(of["seconds"], ".0f"),
                "-" if name == REFERENCE else _known(of["against"], ".2f"),
                _spread(of["loss"], ".3f"),
                f"{statistics.fmean(of['taken']):.0%}",
                f"{statistics.fmean(of['rounds']):.1f}",
                f"{statistics.fmean(of['members']):.1f}",
                str(sum(of["failed"])),
                f"{statistics.median(back):.1f}, {max(back):.1f}" if back else "-",
                f"{statistics.fmean(of['bytes']) / 2**20:.0f}",
            ]
        )
    return markdown(head, rows)


def verdict(found: Mapping[str, Any]) -> str:
    """Who is there first with how many seeds, and how many peers were preempted."""
    counts = [count for of in found["variants"].values() for count in of["preempted"]]
    firsts: dict[str, int] = {}
    for seed in sorted({seed for of in found["variants"].values() for seed in of["seed"]}):
        times = {
            name: of["seconds"][of["seed"].index(seed)]
            for name, of in found["variants"].items()
            if seed in of["seed"]
        }
        there = {name: at for name, at in times.items() if at is not None}
        if there:
            first = min(there, key=lambda name: there[name])
            firsts[first] = firsts.get(first, 0) + 1
    said = ", ".join(
        f"`{name}` with {count} seed{'s' * (count > 1)}" for name, count in firsts.items()
    )
    return f"{min(counts)} to {max(counts)} preemptions in a run. First: {said or 'nobody'}."


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the table."""
    found = results(entries)
    text = f"{table(found)}\n\n{verdict(found)}"
    publish(folder, NAME, found, "moshpit.md", {NAME: text}, partial(draw, found), indent=None)
    return text


def band(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[Any, Any, Any, Any]:
    """Seconds, and the median, least and most of the losses, from where all have one."""
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    at = np.linspace(start, max(start, end), 120)
    points = [np.array(curve) for curve in curves]
    lines = np.array([np.interp(at, one[:, 0], one[:, 1]) for one in points])
    return at, np.median(lines, axis=0), lines.min(axis=0), lines.max(axis=0)


def differences(of: Mapping[str, Any], reference: Mapping[str, Any]) -> list[list[list[float]]]:
    """By seed: how far the loss is above the reference's while both have one."""
    found = []
    for seed, curve in zip(of["seed"], of["curve"], strict=True):
        if seed in reference["seed"]:
            other = np.array(reference["curve"][reference["seed"].index(seed)])
            both = [point for point in curve if other[0, 0] <= point[0] <= other[-1, 0]]
            found.append(
                [[at, loss - float(np.interp(at, other[:, 0], other[:, 1]))] for at, loss in both]
            )
    return found


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Loss by time, and against the reference of its seed, median and range over seeds; each seed's
    seconds to the goal."""
    figure, (above, middle, below) = plt.subplots(
        3, 1, figsize=(7.3, 10.0), layout="constrained", height_ratios=(2, 1.6, 1)
    )
    names = list(found["variants"])
    for place, (name, of) in enumerate(found["variants"].items()):
        at, median, least, most = band(of["curve"])
        colour = COLOURS[name]
        above.plot(at, median, color=colour, linewidth=1.6, label=name)
        above.fill_between(at, least, most, color=colour, alpha=0.15, linewidth=0)
        if name != REFERENCE and REFERENCE in found["variants"]:
            at, median, least, most = band(differences(of, found["variants"][REFERENCE]))
            middle.plot(at, median, color=colour, linewidth=1.6)
            middle.fill_between(at, least, most, color=colour, alpha=0.15, linewidth=0)
        known = [one for one in of["seconds"] if one is not None]
        below.plot(known, [place] * len(known), "o", color=colour, markersize=7)
        if len(known) < len(of["seconds"]):
            text = f"{len(of['seconds']) - len(known)} of {len(of['seconds'])} seeds not in time"
            below.text(0, place, f" {text}", ha="left", va="center")
        else:
            below.plot([statistics.median(known)], [place], "|", color="black", markersize=18)
    above.axhline(GOAL, color="grey", linestyle=":", linewidth=1, label=f"a loss of {GOAL:g}")
    above.set_ylim(None, 3.2)
    above.set_title("loss of peer 0: median of the seeds, range shaded", fontsize=11)
    middle.axhline(0, color=COLOURS[REFERENCE], linewidth=1.6)
    middle.set_ylim(-0.15, 0.6)
    middle.set_title(f"the same above {REFERENCE} of the same seed and second", fontsize=11)
    middle.set_ylabel("difference, nats per byte")
    above.set_xlim(0, found["budget"]["seconds"])
    middle.set_xlim(0, found["budget"]["seconds"])
    above.set_ylabel("validation loss, nats per byte")
    above.legend(fontsize=10)
    below.set_yticks(range(len(names)), names)
    below.set_ylim(len(names) - 0.5, -0.5)
    below.set_xlim(0, found["budget"]["seconds"])
    below.set_title(f"seconds to a loss of {GOAL:g}: each seed, and the median", fontsize=11)
    below.set_xlabel("seconds of training")
    save(figure, path)

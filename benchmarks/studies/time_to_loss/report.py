"""time-to-target.json, the picture, and the tables of README, performance.md and quality.md.

The loss to reach is one for all networks and variants: within ``NEAR`` of what gloo, which loses
nothing, ends with, for the seed that ends highest. A variant that doesn't reach it says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from benchmarks.common.pictures import by_time, plt, save
from benchmarks.common.results import Result, one_budget
from benchmarks.common.tables import fill, markdown, publish
from lossycoll.lab.profiles import PROFILES as LABORATORIES

from .runs import PROFILES, REFERENCES, VARIANTS, Run

Curve = Sequence[tuple[float, int, float]]
NEAR = 1.01
NAME, LOSSES = "time-to-target", "self-made-loss"
ACROSS = 2
"""Panels of the picture in a row."""
COLOURS = dict(
    zip(
        VARIANTS,
        (
            *("tab:red", "tab:orange", "tab:purple", "tab:pink", "tab:olive", "tab:brown"),
            *("tab:blue", "tab:cyan"),
        ),
        strict=True,
    )
)


def check(curve: Curve) -> None:
    """Raises ValueError for what no training writes: no points, time or steps that go back, a loss
    that is no number above 0. One point is a run that was cut off before the second."""
    if not curve:
        raise ValueError("a curve of no points, wanted 1 or more")
    for (t, step, _), (after, later, _) in pairwise(curve):
        if not (t < after and step < later):
            raise ValueError(f"a curve goes back: step {step} at {t} s, then {later} at {after} s")
    for t, step, loss in curve:
        if not (math.isfinite(t) and math.isfinite(loss) and loss > 0):
            raise ValueError(f"a curve has a loss of {loss} at step {step}, {t} s")


def targets(entries: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The loss to reach by network and seed, where gloo took all steps: with more ranks a step sees
    more data, and each seed has another text. Raises ValueError if there is none."""
    ends: dict[str, dict[str, float]] = {}
    for one in entries:
        profile, seed = one.settings["profile"], str(one.settings["seed"])
        _, step, loss = one.figures["curve"][-1]
        if one.settings["variant"] in REFERENCES and step == one.settings["budget"]["steps"]:
            of = ends.setdefault(profile, {})
            of[seed] = max(NEAR * loss, of.get(seed, 0.0))
    if not ends:
        raise ValueError("no run of gloo took all its steps: there is no loss to compare at")
    return ends


def reached(curve: Curve, loss: float) -> float | None:
    """Seconds until the curve is at ``loss``, on a straight line between its points, or None."""
    for (before, _, high), (after, _, low) in pairwise(curve):
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 1.0
            return before + min(1.0, max(0.0, share)) * (after - before)
    return None


def results(entries: Sequence[Result]) -> dict[str, Any]:
    """By network and variant: seconds to the loss and of all steps, by seed. Raises ValueError for
    curves that make no sense, and where runs of more than one budget are mixed."""
    for one in entries:
        check(one.figures["curve"])
    budget = one_budget(entries)
    losses = targets(entries)
    networks: dict[str, dict[str, Any]] = {}
    for one in entries:
        run = Run.of(one.settings)
        variant = networks.setdefault(run.profile, {}).setdefault(
            run.variant,
            {"seeds": [], "seconds": [], "all": [], "ends": [], "curves": [], "bytes": []},
        )
        curve = one.figures["curve"]
        variant["seeds"].append(run.seed)
        target = losses.get(run.profile, {}).get(str(run.seed), 0.0)
        variant["seconds"].append(reached(curve, target))
        variant["all"].append(curve[-1][0] if curve[-1][1] == run.budget.steps else None)
        variant["ends"].append(curve[-1][2])
        variant["curves"].append(curve)
        variant["bytes"].append(one.figures.get("network", {}).get("bytes"))
    commits = sorted({one.commit for one in entries})
    return {
        "targets": losses,
        "budget": budget,
        "commits": commits,
        "dates": _dates(entries),
        "networks": networks,
    }


def median(seconds: Sequence[float | None]) -> float | None:
    """None where a run didn't get there."""
    known = [s for s in seconds if s is not None]
    return statistics.median(known) if len(known) == len(seconds) else None


def fastest_gloo(variants: Mapping[str, Any]) -> float | None:
    """The median seconds to the loss of the faster of gloo's."""
    found = [median(variants[name]["seconds"]) for name in REFERENCES if name in variants]
    return min((s for s in found if s is not None), default=None)


def table(found: Mapping[str, Any]) -> str:
    head = [
        "network",
        "variant",
        "seeds",
        "seconds to the loss",
        "least, most",
        "against gloo's faster",
    ]
    rows = []
    for profile in (name for name in PROFILES if name in found["networks"]):
        variants = found["networks"][profile]
        gloo = fastest_gloo(variants)
        for name in (name for name in VARIANTS if name in variants):
            variant = variants[name]
            spent, whole = median(variant["seconds"]), median(variant["all"])
            known = [s for s in variant["seconds"] if s is not None]
            rows.append(
                [
                    profile,
                    name,
                    str(len(variant["seeds"])),
                    "not reached" if spent is None else f"{spent:.1f}",
                    f"{min(known):.1f}, {max(known):.1f}" if known else "-",
                    "-" if spent is None or gloo is None else f"{gloo / spent:.1f}x",
                    "cut off" if whole is None else f"{whole:.1f}",
                    f"{statistics.fmean(variant['ends']):.4f}",
                    "-" if None in variant["bytes"] else f"{_mib(variant['bytes']):.0f}",
                ]
            )
    return markdown([*head, "seconds for all steps", "loss at the end", "MiB"], rows)


def losses(entries: Sequence[Result]) -> str:
    """Where lossy's runs lost packets: a row for each network, over all of its runs."""
    rows = []
    for profile in PROFILES:
        of = [
            one.figures["network"]
            for one in entries
            if one.settings["profile"] == profile
            and one.settings["variant"] not in REFERENCES
            and "network" in one.figures
        ]
        if of:
            packets, lost, queues = (
                sum(one[name] for one in of) for name in ("packets", "lost", "queues")
            )
            share = f"{lost / packets:.2%}"
            rows.append([f"`{profile}`", f"{len(of)}", f"{packets:,}", share, f"{queues:,}"])
    head = ["network", "runs", "packets", "lost by its links", "dropped by hosts' full queues"]
    return markdown(head, rows)


def _mib(sent: Sequence[float]) -> float:
    return statistics.fmean(sent) / 2**20


def ranks_of(profile: str) -> int:
    """Of a job on all hosts of a network."""
    return LABORATORIES[profile].network.world


def caption(found: Mapping[str, Any]) -> str:
    """The picture, a table with a row for each network, and what its figures are."""
    rows = []
    for profile, variants in found["networks"].items():
        gloo = fastest_gloo(variants)
        ours = {n: median(variants[n]["seconds"]) for n in variants if n not in REFERENCES}
        best = min(((s, n) for n, s in ours.items() if s is not None), default=None)
        if best and gloo is not None:
            ranks = str(ranks_of(profile))
            rows.append([f"`{profile}`", ranks, f"{gloo:.0f} s", f"{best[0]:.0f} s ({best[1]})"])
    head = ["network of the [laboratory](docs/lab.md)", "ranks", "gloo", "lossycoll"]
    return (
        f"![Validation loss against seconds of training](docs/{NAME}.png)\n\n"
        f"{markdown(head, rows)}\n\n"
        "Seconds of training until the validation loss is within 1% of gloo's final loss. "
        f"{_seeds(found['networks'])} gloo has the faster of TCP cubic and bbr "
        f"([all variants](docs/performance.md#time-to-target)). Measured {found['dates']}."
    )


def _seeds(networks: Mapping[str, Any]) -> str:
    """How many seeds the medians are of: as most networks, and the exceptions."""
    counts = {name: min(len(one["seeds"]) for one in of.values()) for name, of in networks.items()}
    usual = statistics.mode(counts.values())
    others = [f"`{name}` has {_spelt(n)}" for name, n in counts.items() if n != usual]
    said = f"Medians of {_spelt(usual)} seeds" if usual > 1 else "Of one seed"
    return "; ".join([said, *others]) + "."


def _spelt(number: int) -> str:
    return ("none", "one", "two", "three", "four", "five", "six")[number]


def _dates(entries: Sequence[Result]) -> str:
    """When something was measured, the first and the last time."""
    days = sorted({one.date for one in entries if one.date})
    if len(days) < 2:
        return f"on {days[0]}" if days else "on an unknown day"
    return f"from {days[0]} to {days[-1]}"


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files, README.md beside the folder included; returns the table."""
    found = results(entries)
    text = table(found)
    publish(folder, NAME, found, "performance.md", {NAME: text}, partial(draw, found), indent=None)
    fill(folder.resolve().parent / "README.md", {NAME: caption(found)})
    fill(folder / "quality.md", {LOSSES: losses(entries)})
    return text


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Loss against seconds, a panel for each network: medians of the seeds, and a band from the
    fastest to the slowest."""
    networks = {name: found["networks"][name] for name in PROFILES if name in found["networks"]}
    rows = math.ceil(len(networks) / ACROSS)
    size = (8, 2.6 * rows + 1)
    figure, axes = plt.subplots(rows, ACROSS, figsize=size, layout="constrained", squeeze=False)
    lines: dict[str, Line2D] = {}
    goal = None
    for axis, (profile, variants) in zip(axes.flat, networks.items(), strict=False):
        for name in (name for name in VARIANTS if name in variants):
            later = [curve[1:] for curve in variants[name]["curves"]]  # the axis has no 0 s
            lines[name] = by_time(axis, later, color=COLOURS[name], linewidth=1.4)
        goals = found["targets"].get(profile, {}).values()
        if goals:
            goal = axis.axhline(statistics.median(goals), color="grey", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_title(f"{profile}, {ranks_of(profile)} ranks", fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("validation loss, nats")
    for axis in list(axes.flat)[len(networks) :]:
        axis.set_visible(False)
    if goal is not None:
        lines["1% above gloo's final loss"] = goal
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize=9)
    save(figure, path)

"""swarm.json, the picture, and what stands between the marks of moshpit.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.common.pictures import Point, by_time, plt, save
from benchmarks.common.results import Result, one_budget
from benchmarks.common.tables import markdown, publish

from .runs import JOINED, PEERS, REFERENCE, VARIANTS, Run

NAME: Final = "swarm"
NEAR: Final = 0.01
"""The goal: with faults the loss at the end is within so much of that without."""
COLOURS: Final = dict(
    zip(
        VARIANTS,
        ("tab:blue", "tab:red", "tab:purple", "tab:olive", "tab:green", "tab:brown"),
        strict=True,
    )
)
STEP, SPENT, MEMBERS, CONTRIBUTIONS, KEPT, WAITED, SECONDS = range(7)
"""Of a round of peer 0."""


def check(figures: Mapping[str, Any]) -> None:
    """Raises ValueError for what no training writes: no points, time or steps that go back, a loss
    that is no number above 0."""
    curve = figures["curve"]
    if not curve or not figures["losses"]:
        raise ValueError("a curve of no points, or no peer that is left")
    for (t, step, _), (after, later, _) in pairwise(curve):
        if not (t < after and step < later):
            raise ValueError(f"a curve goes back: step {step} at {t} s, then {later} at {after} s")
    for loss in (*(point[2] for point in curve), *figures["losses"].values()):
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(f"a loss of {loss}")


def results(entries: Sequence[Result]) -> dict[str, Any]:
    """By variant, with lists by seed. Raises ValueError for figures that make no sense, for runs of
    more than one budget, and where a seed has no run of the variant to compare with."""
    budget = one_budget(entries)
    variants: dict[str, dict[str, Any]] = {}
    for one in sorted(entries, key=lambda one: int(one.settings["seed"])):
        check(one.figures)
        run = Run.of(one.settings)
        of = variants.setdefault(run.variant, {})
        rounds, faults = one.figures["rounds"], one.figures["faults"]
        losses = list(one.figures["losses"].values())
        known = [r[CONTRIBUTIONS] for r in rounds if r[CONTRIBUTIONS] is not None]
        for name, value in {
            "seed": run.seed,
            "loss": statistics.fmean(losses),
            "apart": max(losses) / min(losses) - 1,
            "seconds": rounds[-1][SPENT],
            "round seconds": [r[WAITED] + r[SECONDS] for r in rounds],
            "members": statistics.fmean(r[MEMBERS] for r in rounds),
            "contributions": statistics.fmean(known) if known else None,
            "failed": len(one.figures["failed"]),
            "caught up": [f["caught up"]["after"] for f in faults if f["kind"] == JOINED],
            "faults": faults,
            "bytes": one.figures["network"]["bytes"],
            "curve": one.figures["curve"],
            "date": one.date,
        }.items():
            of.setdefault(name, []).append(value)
    reference = variants.get(REFERENCE, {"seed": [], "loss": []})
    without = dict(zip(reference["seed"], reference["loss"], strict=True))
    for of in variants.values():
        lacking = sorted(set(of["seed"]) - set(without))
        if lacking:
            raise ValueError(f"no run of {REFERENCE!r} with seed {lacking[0]} to compare with")
        pairs = zip(of["seed"], of["loss"], strict=True)
        of["against"] = [loss / without[seed] - 1 for seed, loss in pairs]
    commits = sorted({one.commit for one in entries})
    ordered = {name: variants[name] for name in VARIANTS if name in variants}
    return {"budget": budget, "commits": commits, "variants": ordered}


def table(found: Mapping[str, Any]) -> str:
    head = [
        "variant",
        "seeds",
        "loss at the end",
        f"against `{REFERENCE}`: mean (least, most)",
        "peers apart at most",
        "members",
        "contributions",
        "rounds that failed",
        "round, s: median, longest",
        "newcomers trained after, s",
        "training, s",
        "MiB of all",
    ]
    rows = []
    for name, of in found["variants"].items():
        spent = [seconds for one in of["round seconds"] for seconds in one]
        caught = [seconds for one in of["caught up"] for seconds in one]
        known = [one for one in of["contributions"] if one is not None]
        against = of["against"]
        rows.append(
            [
                name,
                ", ".join(map(str, of["seed"])),
                f"{statistics.fmean(of['loss']):.4f}",
                "-"
                if name == REFERENCE
                else f"{_share(statistics.fmean(against))} "
                f"({_share(min(against))}, {_share(max(against))})",
                f"{max(of['apart']):.2%}",
                f"{statistics.fmean(of['members']):.2f}",
                f"{statistics.fmean(known):.2f}" if known else "-",
                str(sum(of["failed"])),
                f"{statistics.median(spent):.2f}, {max(spent):.2f}",
                f"{min(caught):.1f} to {max(caught):.1f}" if caught else "-",
                f"{statistics.fmean(of['seconds']):.0f}",
                f"{statistics.fmean(of['bytes']) / 2**20:.0f}",
            ]
        )
    return markdown(head, rows)


def _share(one: float) -> str:
    return f"{round(one, 4) + 0.0:+.2%}"  # 0 rather than -0


def verdict(found: Mapping[str, Any]) -> str:
    """Whether the goal is met, in a sentence for each variant with faults."""
    said = []
    for name, of in found["variants"].items():
        if VARIANTS[name].faults:
            within = sum(abs(one) <= NEAR for one in of["against"])
            said.append(
                f"`{name}` ends within {NEAR:.0%} of `{REFERENCE}` for {within} of "
                f"{len(of['against'])} seeds."
            )
    return " ".join(said) or "No run with faults yet."


def write(entries: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the table."""
    found = results(entries)
    text = f"{table(found)}\n\n{verdict(found)}"
    publish(folder, NAME, found, "moshpit.md", {NAME: text}, partial(draw, found), indent=None)
    return text


def common_seeds(found: Mapping[str, Any]) -> list[int]:
    """Those of which every variant has a run: only they make curves that can be compared."""
    return sorted(set.intersection(*(set(of["seed"]) for of in found["variants"].values())))


def curves_of(of: Mapping[str, Any], seeds: Sequence[int]) -> dict[int, list[Point]]:
    """A variant's curves by seed; they have points at the same steps."""
    return {seed: of["curve"][of["seed"].index(seed)] for seed in seeds}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """How far the loss of every seed is from the reference's, and loss over seconds."""
    if not common_seeds(found):
        raise ValueError("no seed of which every variant has a run")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    reference = found["variants"][REFERENCE]
    faults: dict[str, Any] = {}
    for name, of in found["variants"].items():
        how: dict[str, Any] = {"color": COLOURS[name], "linewidth": 1.3, "label": name}
        how["linestyle"] = "--" if VARIANTS[name].faults else "-"
        own, others = (curves_of(one, of["seed"]) for one in (of, reference))
        by_time(right, [curve[1:] for curve in own.values()], **how)  # the axis has no 0 s
        for seed in of["seed"] if name != REFERENCE else ():
            pairs = list(zip(own[seed], others[seed], strict=True))
            changes = [100 * (mine[2] / other[2] - 1) for mine, other in pairs]
            left.plot([mine[1] for mine, _ in pairs], changes, **how, alpha=0.7)
        if of["faults"][0] and not faults:
            faults = {f"peer {one['peer']} {one['kind']}": one for one in of["faults"][0]}
    for text, one in faults.items():
        left.axvline(one["step"], color="grey", linestyle=":", linewidth=0.9)
        left.annotate(
            text,
            (one["step"], 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=7,
            va="top",
            ha="right",
        )
    left.axhspan(-100 * NEAR, 100 * NEAR, color="tab:green", alpha=0.1)
    left.set_ylim(-2, 2)
    for axis, title, label in (
        (left, f"{PEERS} peers, each seed against {REFERENCE}; goal shaded", "steps of each peer"),
        (right, "median of the seeds, band from fastest to slowest", "seconds of training"),
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
    right.set_xscale("log")
    left.set_ylabel("difference of the validation loss, %")
    right.set_ylabel("validation loss of peer 0, nats per byte")
    names = right.get_legend_handles_labels()
    figure.legend(*names, fontsize=9, ncols=5, loc="outside lower center")
    save(figure, path)

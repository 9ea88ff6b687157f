"""Results as files: quality.json, the plots, and the tables between the marks of quality.md."""

from __future__ import annotations

import json
import math
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .matrix import (
    AGE_RULES,
    ARMS,
    BASE,
    DISPERSED,
    GOAL_KINDS,
    GOALS,
    KINDS,
    LOSSES,
    METHODS,
    UNREPAIRED,
    VARIANTS,
    WORLDS,
    Run,
)
from .statistics import Entry, Estimate, accuracy_change, cells, estimate, perplexity_change

BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"
# Of a 7B model on 64 GPUs at single losses (arXiv 2507.07114), in %. Two columns that don't measure
# the same thing and are not one series: the one of the abstract, and one of validation perplexity.
PAPER = {0.1: 0.8, 0.2: 2.6, 0.3: 3.8}
PAPER_VALIDATION = {0.1: 1.17, 0.4: 6.65}
HEADLINE = "replicas"


def write(entries: Mapping[str, Entry], folder: Path) -> None:
    """Everything that can be said with the runs there are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quality.json").write_text(json.dumps(as_json(entries), indent=1) + "\n")
    from . import plot as plots

    plots.write(entries, folder)
    page = folder / "quality.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        for name, table in tables(entries).items():
            text = between(text, name, table)
        page.write_text(text, encoding="utf-8")


def between(text: str, name: str, table: str) -> str:
    """The text with what stands between the marks of ``name`` replaced; unchanged without them."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    head, mark, rest = text.partition(begin)
    _, other, tail = rest.partition(end)
    return f"{head}{mark}\n\n{table}\n\n{other}{tail}" if mark and other else text


def tables(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Markdown by name: what changes, and what the reliable runs reach."""
    change = perplexity_change(HEADLINE)
    out = {"base": base_table(entries), "goals": goal_table(entries)}
    for task, measures in {
        "gpt": {"perplexity": change},
        "digits": {"accuracy": accuracy_change(HEADLINE), "perplexity": change},
    }.items():
        for name, measure in measures.items():
            for world in WORLDS:
                unit = " points" if name == "accuracy" else "%"
                out[f"{task}-{name}-{world}"] = change_table(
                    cells(entries, measure), task, world, unit, paper=task == "gpt"
                )
    for task in ("gpt", "digits"):
        out[f"{task}-drift"] = drift_table(entries, task)
    out["traffic"] = traffic_table(entries)
    out["variants"] = change_table(
        cells(entries, change),
        "gpt",
        WORLDS[0],
        "%",
        paper=False,
        arms=(*METHODS, *AGE_RULES, *VARIANTS, UNREPAIRED, *DISPERSED),
    )
    return out


def change_table(
    found: Mapping[tuple[Any, ...], Estimate],
    task: str,
    world: int,
    unit: str,
    *,
    paper: bool,
    arms: Sequence[str] = ARMS,
) -> str:
    """A row for each kind and rate of loss, a column for each arm."""
    head = ["loss", *arms, *["paper, 7B"] * paper]
    rows = []
    for kind in KINDS:
        for loss in sorted(LOSSES):
            shown = [show(found.get((task, world, kind, loss, arm)), unit) for arm in arms]
            if any(cell != "-" for cell in shown):
                said = [_paper(loss) if kind == "single" else "-"] * paper
                rows.append([f"{loss:.0%} {kind}", *shown, *said])
    nothing = [show(found.get((task, world, "none", 0.0, arm)), unit) for arm in arms]
    if any(cell != "-" for cell in nothing):
        rows.insert(0, ["0%", *nothing, *["-"] * paper])
    return markdown(head, rows)


def _paper(loss: float) -> str:
    told = [f"{PAPER[loss]:+g}%"] if loss in PAPER else []
    told += [f"{PAPER_VALIDATION[loss]:+g}% validation"] if loss in PAPER_VALIDATION else []
    return "; ".join(told)


def base_table(entries: Mapping[str, Entry]) -> str:
    """What the reliable runs reach, over the seeds."""
    rows = []
    for task in ("gpt", "digits"):
        for world in WORLDS:
            found = [
                entry
                for entry in entries.values()
                if (run := Run(**entry["run"])).arm == BASE
                and (run.task, run.world) == (task, world)
            ]
            if found:
                losses = [entry["models"][HEADLINE]["loss"] for entry in found]
                right = [100 * entry["models"][HEADLINE]["accuracy"] for entry in found]
                rows.append(
                    [
                        task,
                        f"{world}",
                        f"{len(found)}",
                        f"{found[0]['parameters']:,}",
                        f"{found[0]['steps']}",
                        _spread(losses, 4),
                        f"{math.exp(plain.fmean(losses)):.3f}",
                        _spread(right, 1) + "%",
                    ]
                )
    head = ["task", "ranks", "seeds", "parameters", "steps", "loss, nats", "perplexity", "accuracy"]
    return markdown(head, rows)


def goal_table(entries: Mapping[str, Entry]) -> str:
    """The goals of perplexity for the GPT, and whether they are met."""
    found = cells(entries, perplexity_change(HEADLINE))
    rows = []
    for arm in (*METHODS, DISPERSED[1]):
        for world in WORLDS:
            for kind in GOAL_KINDS:
                for loss, most in GOALS.items():
                    got = found.get(("gpt", world, kind, loss, arm))
                    if got is not None:
                        rows.append(
                            [
                                arm,
                                f"{world}",
                                f"{loss:.0%} {kind}",
                                f"+{most:g}%",
                                show(got, "%"),
                                verdict(got, most),
                            ]
                        )
        for loss, most in GOALS.items():
            got = together(entries, arm, loss)
            if got is not None:
                kinds = " and ".join(GOAL_KINDS)
                worlds = " and ".join(map(str, WORLDS))
                rows.append(
                    [
                        arm,
                        worlds,
                        f"{loss:.0%} {kinds}",
                        f"+{most:g}%",
                        show(got, "%"),
                        verdict(got, most),
                    ]
                )
    return markdown(["arm", "ranks", "loss", "goal", "measured", ""], rows)


def together(entries: Mapping[str, Entry], arm: str, loss: float) -> Estimate | None:
    """The mean change over all cells that have this goal, from the seeds that have run in all of
    them: runs of one seed share their base, so a seed is one value and not four."""
    change = perplexity_change(HEADLINE)
    values = []
    for seed in sorted({Run(**entry["run"]).seed for entry in entries.values()}):
        wanted = [Run("gpt", w, kind, loss, arm, seed) for w in WORLDS for kind in GOAL_KINDS]
        pairs = [(entries.get(run.key), entries.get(run.base.key)) for run in wanted]
        found = [change(entry, base) for entry, base in pairs if entry and base]
        if len(found) == len(wanted):
            values.append(plain.fmean(found))
    return estimate(values) if values else None


def verdict(got: Estimate, most: float) -> str:
    """Met or missed when the whole interval says so, else what the mean says."""
    if got.high <= most:
        return "met"
    if got.low > most:
        return "missed"
    return f"{'met' if got.mean <= most else 'missed'} on average, not resolved"


def drift_table(entries: Mapping[str, Entry], task: str) -> str:
    """The distance between replicas at the end, in % of the norm of the parameters."""

    def relative(entry: Entry, _: Entry) -> float:
        return 100 * float(entry["drift"]["relative"])

    found = cells(entries, relative)
    rows = []
    for world in WORLDS:
        for kind in KINDS:
            for loss in sorted(LOSSES):
                got = [found.get((task, world, kind, loss, arm)) for arm in ARMS]
                if any(got):
                    shown = ["-" if one is None else _small(one.mean) for one in got]
                    rows.append([f"{world}", f"{loss:.0%} {kind}", *shown])
    return markdown(["ranks", "loss", *ARMS], rows)


def show(got: Estimate | None, unit: str) -> str:
    if got is None:
        return "-"
    half = "" if got.half is None else f" ± {got.half:.2f}"
    return f"{got.mean:+.2f}{half}{unit}"


def _small(percent: float) -> str:
    """To two digits, however small; 0 only where it is."""
    return f"{percent:.2f}%" if percent >= 0.1 or not percent else f"{percent:.1g}%"


def traffic_table(entries: Mapping[str, Entry]) -> str:
    """What the ranks sent together, per step: how much more than the reliable run without loss."""

    def more(entry: Entry, base: Entry) -> float:
        sent, least = (one["traffic"]["bytes_sent"] / one["steps"] for one in (entry, base))
        return 100.0 * (sent / least - 1)

    arms = ("ddp", UNREPAIRED, *METHODS, *AGE_RULES)
    found = cells(entries, more)
    rows = []
    for kind in KINDS:
        for loss in sorted(LOSSES):
            got = [found.get(("gpt", WORLDS[0], kind, loss, arm)) for arm in arms]
            if any(got):
                shown = ["-" if one is None else f"{one.mean:+.0f}%" for one in got]
                rows.append([f"{loss:.0%} {kind}", *shown])
    return markdown(["loss", *arms], rows)


def _spread(values: list[float], digits: int) -> str:
    deviation = f" (sd {plain.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{plain.fmean(values):.{digits}f}{deviation}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "No runs yet."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_json(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Every cell's estimates; the runs themselves are the lines of the results."""
    measures: dict[str, Callable[[Entry, Entry], float]] = {
        "perplexity_change_percent": perplexity_change(HEADLINE),
        "perplexity_change_percent_rank0": perplexity_change("rank0"),
        "perplexity_change_percent_average": perplexity_change("average"),
        "accuracy_change_points": accuracy_change(HEADLINE),
    }
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, measure in measures.items():
        for cell, got in cells(entries, measure).items():
            place = found.setdefault(cell, {})
            place |= dict(zip(("task", "world", "kind", "loss", "arm"), cell, strict=True))
            place |= {"seeds": got.n}
            place[name] = {"mean": got.mean, "half_width_95": got.half}
    return {"headline": HEADLINE, "runs": len(entries), "cells": list(found.values())}

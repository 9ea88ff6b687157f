"""Results as files: quality.json, the plots, and the tables between the marks of quality.md."""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import markdown, publish
from lossycoll.cli.demo.methods import DDP, DRIFT_BOUND

from . import plot
from .matrix import (
    AGE_RULES,
    ALONE_KINDS,
    BASE,
    DIAL_GOALS,
    DIAL_LOSS,
    DIAL_TASKS,
    DISPERSED,
    GOAL_KINDS,
    GOALS,
    HEADLINE,
    KINDS,
    LONG_TASK,
    LOSSES,
    PAPER,
    PAPER_VALIDATION,
    TRIED,
    UNREPAIRED,
    WIRE_LOSSES,
    WIRES,
    WORLDS,
    Run,
    compared,
    dials,
    method_names,
)
from .statistics import Estimate, accuracy_change, cells, estimate, perplexity_change


def write(results: Sequence[Result], folder: Path) -> None:
    """Everything that can be said with the runs there are."""
    entries = {result.key: result for result in results}
    publish(folder, "quality", as_json(entries), "quality.md", tables(entries))
    plot.write(entries, folder)


def tables(entries: Mapping[str, Result]) -> dict[str, str]:
    """Markdown by name: what changes, and what the reliable runs reach."""
    change = perplexity_change(HEADLINE)
    out = {
        "quality-summary": summary_table(entries),
        "base": base_table(entries),
        "goals": goal_table(entries),
    }
    for task, measures in {
        "gpt": {"perplexity": change},
        "digits": {"accuracy": accuracy_change(HEADLINE), "perplexity": change},
    }.items():
        for name, measure in measures.items():
            for world in WORLDS:
                unit = " points" if name == "accuracy" else "%"
                out[f"{task}-{name}-{world}"] = change_table(
                    cells(entries, measure),
                    task,
                    world,
                    unit,
                    names=compared(),
                    paper=task == "gpt",
                )
    for task in ("gpt", "digits"):
        out[f"{task}-drift"] = drift_table(entries, task)
    out["traffic"] = traffic_table(entries)
    out["dial"] = dial_table(entries, DIAL_LOSS)
    out["alone"] = alone_table(entries)
    out["wires"] = wire_table(entries)
    for world in WORLDS:
        found = cells(entries, change)
        out[f"long-streams-{world}"] = change_table(
            found, LONG_TASK, world, "%", names=DIAL_GOALS, paper=False
        )
    out["variants"] = change_table(
        cells(entries, change),
        "gpt",
        WORLDS[0],
        "%",
        paper=False,
        names=(*method_names(), *AGE_RULES, *TRIED, UNREPAIRED, *DISPERSED),
    )
    return out


def dial_table(entries: Mapping[str, Result], loss: float) -> str:
    """A row for each setting of the dial, with 4 ranks: perplexity by task, and bytes."""
    changes = cells(entries, perplexity_change(HEADLINE))
    shares = cells(entries, share_sent)
    columns = [(task, kind) for task in DIAL_TASKS for kind in GOAL_KINDS]
    rows = []
    for variant in dials():
        found = [changes.get((task, WORLDS[0], kind, loss, variant)) for task, kind in columns]
        sent = [shares.get((DIAL_TASKS[0], WORLDS[0], kind, loss, variant)) for kind in GOAL_KINDS]
        if all(found):
            bytes_sent = ["-" if one is None else f"{one.mean:.2f}" for one in sent]
            rows.append([variant, *(show(one, "%") for one in found), *bytes_sent])
    head = [f"{task}, {kind}" for task, kind in columns]
    return markdown(["variant", *head, *(f"bytes, {kind}" for kind in GOAL_KINDS)], rows)


def change_table(
    found: Mapping[tuple[Any, ...], Estimate],
    task: str,
    world: int,
    unit: str,
    *,
    names: Sequence[str],
    paper: bool,
) -> str:
    """A row for each kind and rate of loss, a column for each variant."""
    head = ["loss", *names, *["paper, 7B"] * paper]
    rows = []
    for kind in KINDS:
        for loss in sorted(LOSSES):
            shown = [show(found.get((task, world, kind, loss, variant)), unit) for variant in names]
            if any(cell != "-" for cell in shown):
                said = [_paper(loss) if kind == "single" else "-"] * paper
                rows.append([f"{loss:.0%} {kind}", *shown, *said])
    nothing = [show(found.get((task, world, "none", 0.0, variant)), unit) for variant in names]
    if any(cell != "-" for cell in nothing):
        rows.insert(0, ["0%", *nothing, *["-"] * paper])
    return markdown(head, rows)


def _paper(loss: float) -> str:
    published = [f"{PAPER[loss]:+g}%"] if loss in PAPER else []
    published += [f"{PAPER_VALIDATION[loss]:+g}% validation"] if loss in PAPER_VALIDATION else []
    return "; ".join(published)


def base_table(entries: Mapping[str, Result]) -> str:
    """What the reliable runs reach, over the seeds."""
    rows = []
    for task in DIAL_TASKS:
        for world in WORLDS:
            found = [
                entry
                for entry in entries.values()
                if (run := Run.of(entry.settings)).variant == BASE
                and (run.task, run.world) == (task, world)
            ]
            if found:
                losses = [entry.figures["models"][HEADLINE]["loss"] for entry in found]
                right = [100 * entry.figures["models"][HEADLINE]["accuracy"] for entry in found]
                rows.append(
                    [
                        task,
                        f"{world}",
                        f"{len(found)}",
                        f"{found[0].figures['parameters']:,}",
                        f"{found[0].figures['steps']}",
                        _spread(losses, 4),
                        f"{math.exp(plain.fmean(losses)):.3f}",
                        _spread(right, 1) + "%",
                    ]
                )
    head = ["task", "ranks", "seeds", "parameters", "steps", "loss, nats", "perplexity", "accuracy"]
    return markdown(head, rows)


def summary_table(entries: Mapping[str, Result]) -> str:
    """The first table of the page: the methods with resending, and DDP alone."""
    found = cells(entries, perplexity_change(HEADLINE))
    methods = {
        "DDP with DriftBound": "ddp+driftbound",
        "ShardedOptimizer": "sharded",
    }
    got = {
        name: [together(entries, variant, loss) for loss in GOALS]
        for name, variant in methods.items()
    }
    plain = [found.get(("gpt", WORLDS[0], "single", loss, "ddp")) for loss in GOALS]
    got[f"plain DDP ({WORLDS[0]} ranks, single losses)"] = plain
    rows = [
        [name, *("-" if one is None else f"{one.mean:+.2f}%" for one in row)]
        for name, row in got.items()
    ]
    first, *others = (f"{loss:.0%}" for loss in GOALS)
    return markdown(["method", f"{first} loss", *others], rows)


def goal_table(entries: Mapping[str, Result]) -> str:
    """The goals of perplexity for the GPT, and whether they are met."""
    found = cells(entries, perplexity_change(HEADLINE))
    rows = []
    for variant in (*method_names(), DISPERSED[1], *DIAL_GOALS):
        for world in WORLDS:
            for kind in GOAL_KINDS:
                for loss, most in GOALS.items():
                    got = found.get(("gpt", world, kind, loss, variant))
                    if got is not None:
                        rows.append(
                            [
                                variant,
                                f"{world}",
                                f"{loss:.0%} {kind}",
                                f"+{most:g}%",
                                show(got, "%"),
                                verdict(got, most),
                            ]
                        )
        for loss, most in GOALS.items():
            got = together(entries, variant, loss)
            if got is not None:
                kinds = " and ".join(GOAL_KINDS)
                worlds = " and ".join(map(str, WORLDS))
                rows.append(
                    [
                        variant,
                        worlds,
                        f"{loss:.0%} {kinds}",
                        f"+{most:g}%",
                        show(got, "%"),
                        verdict(got, most),
                    ]
                )
    return markdown(["variant", "ranks", "loss", "goal", "measured", ""], rows)


def alone_table(entries: Mapping[str, Result]) -> str:
    """The goals of parity alone: by task and of all, over 4 and 8 ranks; bytes are of the medians
    of cells."""
    shares = cells(entries, share_sent)
    rows = []
    for variant in DIAL_GOALS:
        for tasks in (*((task,) for task in DIAL_TASKS), DIAL_TASKS):
            for loss, most in GOALS.items():
                got = together(entries, variant, loss, tasks, ALONE_KINDS)
                if got is None:
                    continue
                by_kind = [together(entries, variant, loss, tasks, (k,)) for k in ALONE_KINDS]
                sent = [
                    shares[task, world, kind, loss, variant].mean
                    for task, world, kind in product(tasks, WORLDS, ALONE_KINDS)
                ]
                rows.append([
                    *(variant, tasks[0] if len(tasks) == 1 else "all", f"{loss:.0%}"),
                    *(f"{got.n}", *(show(one, "%") for one in by_kind), show(got, "%")),
                    *(f"+{most:g}%", verdict(got, most), f"{plain.median(sent):.2f}"),
                ])  # fmt: skip
    head = ("variant", "task", "loss", "seeds", "single", "bursts of 8", "bursts of 5", "all")
    return markdown([*head, "goal", "", "bytes"], rows)


def together(
    entries: Mapping[str, Result],
    variant: str,
    loss: float,
    tasks: Sequence[str] = ("gpt",),
    kinds: Sequence[str] = GOAL_KINDS,
) -> Estimate | None:
    """The mean change over all cells that have this goal, from the seeds that have run in all of
    them: runs of one seed share their base, so a seed is one value and not many."""
    change = perplexity_change(HEADLINE)
    values = []
    for seed in sorted({Run.of(entry.settings).seed for entry in entries.values()}):
        wanted = [
            Run(task, world, kind, loss, variant, seed)
            for task, world, kind in product(tasks, WORLDS, kinds)
        ]
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


def drift_table(entries: Mapping[str, Result], task: str) -> str:
    """The distance between replicas at the end, in % of the norm of the parameters."""

    def relative(entry: Result, _: Result) -> float:
        return 100 * float(entry.figures["drift"]["relative"])

    found = cells(entries, relative)
    rows = []
    for world in WORLDS:
        for kind in KINDS:
            for loss in sorted(LOSSES):
                got = [found.get((task, world, kind, loss, variant)) for variant in compared()]
                if any(got):
                    shown = ["-" if one is None else _small(one.mean) for one in got]
                    rows.append([f"{world}", f"{loss:.0%} {kind}", *shown])
    return markdown(["ranks", "loss", *compared()], rows)


def show(got: Estimate | None, unit: str) -> str:
    if got is None:
        return "-"
    half = "" if got.half is None else f" ± {got.half:.2f}"
    return f"{got.mean:+.2f}{half}{unit}"


def _small(percent: float) -> str:
    """To two digits, however small; 0 only where it is."""
    return f"{percent:.2f}%" if percent >= 0.1 or not percent else f"{percent:.1g}%"


def share_sent(entry: Result, base: Result) -> float:
    """The bytes that all ranks have sent per step, relative to those of the base."""
    sent, least = (
        one.figures["traffic"]["bytes_sent"] / one.figures["steps"] for one in (entry, base)
    )
    return float(sent / least)


def traffic_table(entries: Mapping[str, Result]) -> str:
    """What the ranks sent together, per step: how much more than the reliable run without loss."""

    def more(entry: Result, base: Result) -> float:
        return 100.0 * (share_sent(entry, base) - 1)

    names = (DDP.name, UNREPAIRED, *method_names(), *AGE_RULES)
    found = cells(entries, more)
    rows = []
    for kind in KINDS:
        for loss in sorted(LOSSES):
            got = [found.get(("gpt", WORLDS[0], kind, loss, variant)) for variant in names]
            if any(got):
                shown = ["-" if one is None else f"{one.mean:+.0f}%" for one in got]
                rows.append([f"{loss:.0%} {kind}", *shown])
    return markdown(["loss", *names], rows)


def wire_table(entries: Mapping[str, Result]) -> str:
    """Gradients in few bits: what each costs, and what the ranks send, relative to float32."""

    change, sent = cells(entries, perplexity_change(HEADLINE)), cells(entries, share_sent)
    rows = []
    for variant in (DRIFT_BOUND.name, *WIRES):
        at = [
            ("gpt", WORLDS[0], KINDS[0] if loss else "none", loss, variant) for loss in WIRE_LOSSES
        ]
        if not any(cell in change for cell in at):
            continue
        shown = [show(change.get(cell), "%") for cell in at]
        shares = ["-" if cell not in sent else f"{sent[cell].mean:.2f}" for cell in at]
        rows.append([variant, *shown, *shares])
    losses = [f"{loss:.0%}" for loss in WIRE_LOSSES]
    titles = (f"{what} at {loss}" for what in ("perplexity", "bytes") for loss in losses)
    return markdown(["variant", *titles], rows)


def _spread(values: list[float], digits: int) -> str:
    deviation = f" (sd {plain.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{plain.fmean(values):.{digits}f}{deviation}"


def as_json(entries: Mapping[str, Result]) -> dict[str, Any]:
    """Every cell's estimates; the runs themselves are the lines of the results."""
    measures: dict[str, Callable[[Result, Result], float]] = {
        "perplexity_change_percent": perplexity_change(HEADLINE),
        "perplexity_change_percent_rank0": perplexity_change("rank0"),
        "perplexity_change_percent_average": perplexity_change("average"),
        "accuracy_change_points": accuracy_change(HEADLINE),
    }
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, measure in measures.items():
        for cell, got in cells(entries, measure).items():
            place = found.setdefault(cell, {})
            place |= dict(zip(("task", "world", "kind", "loss", "variant"), cell, strict=True))
            place |= {"seeds": got.n}
            place[name] = {"mean": got.mean, "half_width_95": got.half}
    return {"headline": HEADLINE, "runs": len(entries), "cells": list(found.values())}

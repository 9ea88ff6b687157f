"""Runs the table of networks in virtual time, and says which goals are missed.

``python -m benchmarks network_law`` runs what has no result yet with this very engine;
``--sample`` is small enough for the short suite. Exit status 1: a goal is missed. ``--report docs``
writes the table of docs/congestion-results.md.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict

import lossycoll._native
import lossycoll._sim
import numpy as np

from benchmarks.common.results import ROOT, Result, append, load, source
from benchmarks.common.tables import fill_and_keep, markdown
from lossycoll.cli.lab import tcp_flows
from lossycoll.options.fields import Options
from lossycoll.runtime.keys.secret import Secret
from lossycoll.simulate.collective import Change, simulate_collective
from lossycoll.simulate.training import simulate_training

from .cases import SETTLE, Case, cases, sample

COUNTS = ("dropped_up", "dropped_down", "dropped_gateway", "policed", "lost", "overflow")
AT = 0.4
"""When a change comes: this share of its call's limit."""


class Parity(TypedDict, total=False):
    """Of the options: the one that is given."""

    fec: float
    max_missing: float


def measure(case: Case, pacing: str = Options().pacing) -> dict[str, Any]:
    """The figures of one case."""
    parity: Parity = {"max_missing": case.max_missing} if case.max_missing else {"fec": case.fec}
    options = Options(
        delivery=case.delivery,
        repair=case.repair,
        algorithm=case.algorithm,
        pacing=pacing,
        **parity,
    )
    if case.change == "death":
        return _with_death(case, replace(options, on_peer_loss="continue"))
    nbytes, step = round(case.mib * (1 << 20)), SETTLE + 1
    changes = [
        Change(SETTLE + step * number, AT * _busy(before), after.network)
        for number, (before, after) in enumerate(itertools.pairwise([case, *case.later]))
    ]
    settle = SETTLE + step * len(changes)
    begin = time.perf_counter()
    found = simulate_collective(
        case.network,
        nbytes,
        collective=case.collective,
        hosts=case.hosts,
        ranks_per_host=case.ranks,
        options=options,
        calls=settle + case.calls,
        settle=settle,
        gap=case.gap_s,
        changes=changes,
        tcp=[tcp_flows(case.tcp)] if case.tcp else [],
        secret=Secret.of(b"matrix") if case.sealed else None,
    )
    last = changes[-1].network if changes else case.network
    sent = sum(call.counts.packets for call in found.steady)
    return {
        "ratio": found.ratio,
        "missing": found.missing,
        "spread": found.spread,
        "loss": (last.wan if case.sites > 1 else last.link).loss,
        "seconds": found.seconds,
        "p99": found.seconds_p99,
        "limit": found.calls[-1].limit,
        "bound": found.bound,
        "failed": found.failed,
        "ratios": [round(call.ratio, 4) for call in found.calls],
        "missings": [round(call.missing, 6) for call in found.calls],
        "drops": {
            name: sum(getattr(call.counts, name) for call in found.steady) / max(1, sent)
            for name in COUNTS
        },
        "job": 1 / found.ratio if found.ratio else 0.0,
        "tcp": max((flow.mbit / case.mbit for flow in found.tcp), default=0.0),
        "wall": time.perf_counter() - begin,
    }


def _busy(case: Case) -> float:
    """Seconds that a port needs for an all-reduce's bytes."""
    share = 2 * (case.hosts - 1) / case.hosts
    return share * round(case.mib * (1 << 20)) * 8e-6 / (case.up_mbit or case.mbit)


def _with_death(case: Case, options: Options) -> dict[str, Any]:
    """The figures of one in whose third call the last host is dead, by steps of training that
    compute nothing: they have a membership."""
    begin, steps = time.perf_counter(), 2 * SETTLE + 1 + case.calls
    found = simulate_training(
        case.network,
        [round(case.mib * (1 << 20))],
        np.zeros((steps, case.hosts, 1)),
        hosts=case.hosts,
        options=options,
        death=SETTLE,
        settle=2 * SETTLE + 1,
    )
    limit = _busy(case.later[-1]) + case.rtt_ms * 1e-3
    return {
        "ratio": found.seconds / limit,
        "missing": found.missing,
        "loss": case.loss,
        "seconds": found.seconds,
        "p99": found.seconds_p99,
        "limit": limit,
        "bound": found.bound,
        "failed": 0,
        "ratios": [round(step.seconds / limit, 4) for step in found.steps],
        "missings": [round(step.missing, 6) for step in found.steps],
        "drops": {},
        "wall": time.perf_counter() - begin,
    }


def missed(case: Case, figures: dict[str, Any]) -> list[str]:
    """Which of the case's goals are."""
    goal, out = case.goal, []
    if figures["failed"]:
        out.append(f"a call failed with code {figures['failed']}")
    if goal.ratio is not None and figures["ratio"] > goal.ratio:
        out.append(f"time {figures['ratio']:.2f} > {goal.ratio:.2f}")
    restored = case.delivery != "lossy" or case.repair or case.fec
    by_chance = figures.get("drops", {}).get("lost", 0.0)  # more than asked, where bursts are lost
    lost = max(figures["loss"], by_chance)
    expected = case.max_missing or (0.0 if restored else lost)
    if goal.missing is not None and figures["missing"] > expected + goal.missing:
        out.append(f"missing {figures['missing']:.2%} > {expected + goal.missing:.2%}")
    if goal.job is not None and not goal.job[0] <= figures["job"] <= goal.job[1]:
        out.append(f"job {figures['job']:.0%} of the link")
    if goal.tcp is not None and figures["tcp"] < goal.tcp:
        out.append(f"TCP {figures['tcp']:.0%} of the link")
    if goal.spread is not None and figures.get("spread", 0.0) > goal.spread:
        out.append(f"shares {figures['spread']:.2f} > {goal.spread:.2f}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seeds > 1 and options.report is not None:
        parser.error("the table has one seed of each case")
    wanted = [
        replace(case, seed=case.seed + number)
        for case in (sample() if options.sample else cases())
        if _fits(case, options)
        for number in range(options.seeds)
    ]
    kept = f"network_law-{engine()}-{options.pacing}.jsonl"
    path = options.results or ROOT / "build" / kept
    done = {} if options.again else load(path)
    left = sorted((case for case in wanted if case.key not in done), key=lambda case: -case.work)
    print(f"{len(wanted)} cases, {len(left)} to do; results: {path}", file=sys.stderr)
    for case, figures in _measured(left, options.jobs, options.pacing):
        result = Result(case.settings, figures, **source("benchmarks/studies/network_law"))
        append(path, result)
        done[case.key] = result
        if options.progress:
            print(row(case, figures), file=sys.stderr, flush=True)
    bad = 0
    for case in wanted:
        figures = done[case.key].figures
        bad += bool(missed(case, figures))
        if options.all or missed(case, figures):
            print(row(case, figures))
    print(f"{len(wanted) - bad} of {len(wanted)} cases reach their goals")
    if options.report is not None:
        report({case: done[case.key] for case in wanted}, options.report)
    if options.json is not None:
        rows = [
            {"case": case.settings, "missed": missed(case, done[case.key].figures)}
            | {"figures": done[case.key].figures}
            for case in wanted
        ]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if bad else 0


def engine() -> str:
    """Tells this build of the engine from others."""
    built = [Path(one.__file__).read_bytes() for one in (lossycoll._native, lossycoll._sim)]
    return hashlib.sha256(b"".join(built)).hexdigest()[:10]


def row(case: Case, figures: dict[str, Any]) -> str:
    """One line: name, time over limit, missing, where packets went, and what is missed."""
    drops = " ".join(
        f"{name.removeprefix('dropped_')} {share:.2%}"
        for name, share in figures["drops"].items()
        if share
    )
    verdict = "; ".join(missed(case, figures)) or "ok"
    return (
        f"{name_of(case):58} x {figures['ratio']:5.2f}  missing {figures['missing']:7.2%}  "
        f"[{drops}]  {figures['wall']:.1f} s  {verdict}"
    )


def report(found: Mapping[Case, Result], folder: Path) -> None:
    """Writes the table between the marks of congestion-results.md, and a line that sums it up."""
    rows = []
    for case, result in found.items():
        figures, network = result.figures, name_of(case).partition(": ")[2]
        verdict = "; ".join(missed(case, figures))
        share = f"{figures['missing']:.2%}"
        rows.append([case.kind, network, f"{figures['ratio']:.2f}", share, verdict or "reached"])
    reached = sum(row[-1] == "reached" for row in rows)
    which = ", ".join(sorted({f"{one.date} at {one.commit}" for one in found.values()}))
    head = ["kind", "network", "time / limit", "missing", "goal"]
    text = f"{reached} of {len(rows)} networks reach their goals (measured {which})."
    table = f"{text}\n\n{markdown(head, rows)}"
    fill_and_keep(folder / "congestion-results.md", "matrix", table)


def name_of(case: Case) -> str:
    """The fields that say something."""
    usual = asdict(Case(case.kind, 0, 0, 0, 0))
    said = [f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}"
            for n, v in asdict(case).items() if v != usual[n]]  # fmt: skip
    return f"{case.kind}: {' '.join(said)}"


def _measured(
    left: Sequence[Case], jobs: int, pacing: str
) -> Iterable[tuple[Case, dict[str, Any]]]:
    if jobs == 1:
        yield from ((case, measure(case, pacing)) for case in left)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(measure, case, pacing): case for case in left}
        for future in as_completed(running):
            yield running[future], future.result()


def _fits(case: Case, options: argparse.Namespace) -> bool:
    known = not options.only or re.search(options.only, name_of(case)) is not None
    return known and (not options.most or case.work <= options.most)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks network_law", description=__doc__)
    add = parser.add_argument
    add("--sample", action="store_true", help="a few cases, for the short suite")
    add("--only", metavar="REGEX", help="cases whose names match, as in 'clean: hosts=8'")
    add("--most", type=float, default=0, metavar="N", help="cases of at most N million packets")
    add("--seeds", type=int, default=1, metavar="N", help="each case with so many (%(default)s)")
    add("--pacing", choices=("path", "port"), default=Options().pacing, help="the option")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    add("--all", action="store_true", help="print all cases, not only those that miss a goal")
    add("--progress", action="store_true", help="print each as it ends, on standard error")
    add("--again", action="store_true", help="run what this engine has results of, too")
    add("--results", type=Path, help="where results of one pacing are (build/network_law-*)")
    add("--json", type=Path, metavar="PATH", help="where to write all figures")
    add("--report", type=Path, metavar="FOLDER", help="of congestion-results.md, for its table")
    return parser

"""The study of quality: ``python -m benchmarks.studies.quality.measure``.

Runs what is not done yet, the most important first, and can be stopped at any time; then writes the
results, the plots and the tables of docs/quality.md from what there is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common import results as store

from . import variants as arms
from .matrix import FULL_SEEDS, Run, only, runs
from .pool import Pool, RunFailed

FAILURES_ALLOWED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        wanted = only(list(runs(range(1, options.seeds + 1))), options.only)
    except ValueError as error:
        console.print(f"--only: {error}", markup=False)
        return 2
    if not options.report_only:
        code = study(wanted, options.results, options.limit_minutes, options.steps, console)
        if code:
            return code
    if options.report:
        from . import report

        report.write(store.load(options.results), options.report)
        console.print(f"tables and plots: {options.report}", markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.quality.measure", description=__doc__
    )
    add = parser.add_argument
    help_seeds = f"runs of each kind (6); those beyond {FULL_SEEDS} only of what has a goal"
    add("--seeds", type=int, default=6, help=help_seeds)
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="runs that fit, as in task=gpt or loss=0.1,0.2; may be repeated",
    )
    add("--limit-minutes", type=float, default=0, help="start no run after so long (no limit)")
    add("--steps", type=int, help="of each run, to try something out; not for the study")
    add(
        "--results",
        type=Path,
        default=store.ROOT / "benchmarks" / "studies" / "quality" / "results.jsonl",
        help="where results are appended",
    )
    add("--report", type=Path, default=None, help="folder for tables and plots, such as docs")
    add("--report-only", action="store_true", help="run nothing")
    return parser


def study(
    wanted: Sequence[Run], results: Path, limit_minutes: float, steps: int | None, console: Console
) -> int:
    """Does the runs that ``results`` doesn't have yet. Returns the exit status."""
    done = store.load(results)
    left = [run for run in wanted if run.key not in done]
    for arm in sorted({run.arm for run in left}):
        reason = arms.missing(arm)
        if reason:
            console.print(f"arm {arm} is left out: {reason}", markup=False)
            left = [run for run in left if run.arm != arm]
    console.print(f"{len(wanted)} runs, {len(left)} to do")
    return _do(left, results, limit_minutes * 60, steps, console)


def _do(
    left: Sequence[Run], results: Path, limit: float, steps: int | None, console: Console
) -> int:
    commit = store.commit()
    pools: dict[int, Pool] = {}
    failures = 0
    seconds = {(run.task, run.world): 0.0 for run in left}
    counts = dict.fromkeys(seconds, 0)
    begin = time.monotonic()
    progress = Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
    )
    try:
        with progress:
            bar = progress.add_task("", total=len(left), left="")
            for number, run in enumerate(left):
                if limit and time.monotonic() - begin > limit:
                    break
                remaining = _left(left[number:], seconds, counts)
                progress.update(bar, description=run.key, completed=number, left=remaining)
                for world in [world for world in pools if world != run.world]:
                    pools.pop(world).close()  # idle ranks would still hold their memory
                started = time.monotonic()
                try:
                    pool = pools.get(run.world) or pools.setdefault(run.world, Pool(run.world))
                    found = pool.run(run, steps)
                except RunFailed as error:
                    pools.pop(run.world, None)
                    failures += 1
                    console.print(str(error), markup=False)
                    if failures >= FAILURES_ALLOWED:
                        console.print(f"{failures} runs have failed; the others are not tried")
                        return 1
                    continue
                entry = store.append(results, run, found, commit)
                seconds[run.task, run.world] += time.monotonic() - started
                counts[run.task, run.world] += 1
                progress.update(bar, completed=number + 1)
                if not console.is_terminal:
                    loss = entry["models"]["rank0"]["loss"]
                    console.print(f"{run.key} loss {loss:.4f} {remaining}", markup=False)
    finally:
        for pool in pools.values():
            pool.close()
    return 1 if failures else 0


def _left(
    left: Sequence[Run], seconds: dict[tuple[str, int], float], counts: dict[tuple[str, int], int]
) -> str:
    """The time that is left, from runs of the same task and world; of any, where there is none."""
    if not sum(counts.values()):
        return ""
    overall = sum(seconds.values()) / sum(counts.values())
    total = 0.0
    for run in left:
        kind = (run.task, run.world)
        total += seconds[kind] / counts[kind] if counts[kind] else overall
    return f"{total / 60:.0f} min left"


if __name__ == "__main__":
    sys.exit(main())

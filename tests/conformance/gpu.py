"""``python -m tests.conformance.gpu``: the suite's tests about GPUs, on one GPU that ranks share.

They run against gloo and against lossy at the same time, several tests at once. What is printed
last is a table, test by test; the exit status says whether lossy fails where gloo passes.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .__main__ import WorkerError, facts, outcomes
from .modes import MODES
from .runner import Outcome
from .table import counts, skip_reasons
from .verdict import contradictions

Runs = dict[str, dict[str, Outcome]]
"""By mode."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance.gpu", description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["gloo", "reliable"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=[], help="only these")
    parser.add_argument("--jobs", type=int, default=5, help="tests of a mode at the same time")
    parser.add_argument("--limit", type=float, default=40, help="seconds for a test")
    parser.add_argument("--seconds", type=float, default=210, help="for all; then it says so")
    parser.add_argument("--write", type=Path, help="where to write the table")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    runs: Runs = {mode: {} for mode in given.modes}
    lock = threading.Lock()

    def part_of(mode: str, part: int) -> str:
        more = ("--one-gpu", "--limit", str(given.limit), "--part", f"{part + 1}/{given.jobs}")
        try:
            for name, outcome in outcomes(mode, given.world, given.tests or None, *more):
                with lock:
                    runs[mode][name] = outcome
                    print(f"[{mode}] {outcome.seconds:6.2f} s  {outcome.kind:7} {name}", end="")
                    print(f"  {outcome.reason}"[:1500], flush=True)
                if time.monotonic() > end:
                    return f"{mode}, part {part + 1}: not done after {given.seconds:g} s"
        except WorkerError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(given.modes) * given.jobs) as pool:
        parts = [pool.submit(part_of, m, p) for m in given.modes for p in range(given.jobs)]
    troubles = [text for part in parts if (text := part.result())]
    page = _page(runs, given.world, troubles)
    print(page)
    if given.write:
        given.write.write_text(page, encoding="utf-8")
    return 1 if troubles or _bad(runs, given.world) else 0


def _bad(runs: Runs, world: int) -> list[str]:
    gloo = runs.get("gloo", {})
    found = []
    for mode, run in runs.items():
        if mode != "gloo":
            both = {name: outcome for name, outcome in run.items() if name in gloo}
            found += [f"{one}" for one in contradictions(gloo, both, mode, world)]
    return found


def _page(runs: Runs, world: int, troubles: list[str]) -> str:
    lines = ["# Conformance on a GPU", "", *(f"- {fact}" for fact in facts()), f"- GPU: {_gpu()}"]
    lines += [f"- Ranks: {world}, which share the GPU", ""]
    for mode, run in runs.items():
        lines += [f"- *{mode}*: {counts(run)}"]
        lines += [f"    - {count} skipped: {why}" for why, count in skip_reasons(run).most_common()]
    for text in (*troubles, *_bad(runs, world)):
        lines += [f"- not as known: {text}"]
    lines += ["", "| test | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for name in sorted({name for run in runs.values() for name in run}):
        kinds = [run[name].kind if name in run else "-" for run in runs.values()]
        if set(kinds) != {"skip"}:
            lines.append(f"| `{name}` | " + " | ".join(kinds) + " |")
    return "\n".join([*lines, ""])


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())

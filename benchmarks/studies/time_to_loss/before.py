"""Old beside new: ``python -m benchmarks.studies.time_to_loss.before COMMIT --report docs``.

COMMIT's results, from git, beside today's, where lossy's rows differ: seconds to the same loss.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, STUDIES, Result, load
from benchmarks.common.tables import fill_and_keep, markdown

from .report import fastest_gloo, median, results
from .runs import VARIANTS

PATH = STUDIES / "time_to_loss" / "results.jsonl"


def results_of(commit: str) -> list[Result]:
    """Those that git has of a commit. Raises CalledProcessError where it has none."""
    named = f"{commit}:{PATH.relative_to(ROOT)}"
    text = subprocess.run(["git", "show", named], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PATH.name
        path.write_bytes(text)
        return list(load(path).values())


def table(old: Sequence[Result], new: Sequence[Result]) -> str:
    """A line for each network and variant whose curves differ, of the seeds that both have."""
    after = {one.key: one for one in new}
    pairs = [(one, after[one.key]) for one in old if one.key in after]
    before, now = (results([pair[at] for pair in pairs])["networks"] for at in (0, 1))
    lines = []
    for network, variants in now.items():
        for name in (name for name in VARIANTS if name in variants):
            was, found = before[network][name], variants[name]
            if was["curves"] != found["curves"]:
                gained = (_against(before[network], was), _against(variants, found))
                lines.append([
                    *(network, name, f"{len(found['seeds'])}"),
                    *(_shown(median(one["seconds"]), "") for one in (was, found)),
                    *(_shown(one, "x") for one in gained),
                ])  # fmt: skip
    head = ("network", "variant", "seeds", "seconds, before", "now")
    return markdown([*head, "against gloo's faster, before", "now"], lines)


def _against(variants: Mapping[str, Any], one: Mapping[str, Any]) -> float | None:
    gloo, spent = fastest_gloo(variants), median(one["seconds"])
    return gloo / spent if gloo and spent else None


def _shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.1f}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", help="whose results are the old ones")
    parser.add_argument("--report", type=Path, help="folder of performance.md, for the table")
    options = parser.parse_args()
    text = table(results_of(options.commit), list(load(PATH).values()))
    print(text)
    if options.report:
        fill_and_keep(options.report / "performance.md", "time-to-target-before", text)


if __name__ == "__main__":
    main()

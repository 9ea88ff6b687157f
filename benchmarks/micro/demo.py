"""Tables of what ``lossycoll demo`` has written: python -m benchmarks.micro.demo FILE...

The files of ``lossycoll demo`` are the table of demo.md. With ``--losses``, one of another loss
(``lossycoll demo --loss 0.01 --steps 80``) is the table of quality.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.tables import Table, add_report, fill_and_keep, taken
from lossycoll.cli.demo.methods import methods
from lossycoll.cli.demo.report import FIGURES

Run = Mapping[str, Any]
NAMES: Final = {
    "ddp": "DDP",
    "ddp+driftbound": "DDP with DriftBound",
    "sharded": "ShardedOptimizer",
}
LOSSES: Final = Table(
    "quality.md",
    "demo-losses",
    "lost | method | change of perplexity | more bytes than DDP",
    keys=2,
)


def table(results: Sequence[Mapping[str, Any]]) -> tuple[Table, list[list[str]]]:
    """A column for each run, a row for each figure: of several demos the median, least and most."""
    runs: dict[str, Run] = results[0]["runs"]
    heads = [
        f"{name}, {run['injected_loss']:.0%} lost" if run["injected_loss"] else name
        for name, run in runs.items()
    ]
    rows = [
        [label, *(_median([show(one["runs"][name]) for one in results]) for name in runs)]
        for label, show in FIGURES.items()
    ]
    return Table("demo.md", "demo", " | ".join(["figure", *heads]), dated=False), rows


def _median(texts: Sequence[str]) -> str:
    if len(set(texts)) == 1:
        return texts[0]
    ordered = sorted(texts, key=lambda text: float(text.strip("%").replace(",", "")))
    return f"{ordered[(len(ordered) - 1) // 2]} ({ordered[0]} to {ordered[-1]})"


def losses(results: Mapping[str, Any]) -> list[list[str]]:
    """Rows of LOSSES: of the methods that lose packets."""
    rows, plain = [], None
    for one in methods():
        run = results["runs"][one.run_name]
        sent = run["traffic"]["bytes_sent"]
        plain = plain or sent
        change = f"{run['perplexity_change_percent']:+.2f}%"
        rows.append(
            [
                f"{run['injected_loss']:.0%}",
                NAMES.get(one.name, one.name),
                change,
                f"{sent / plain - 1:+.1%}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="demo.json")
    parser.add_argument("--losses", action="store_true", help="rows of quality.md")
    add_report(parser, "demo.md, or quality.md")
    options = parser.parse_args()
    results = [json.loads(file.read_text(encoding="utf-8")) for file in options.files]
    out, rows = (LOSSES, losses(results[0])) if options.losses else table(results)
    print(out.report(options.report, rows))
    if options.report and not options.losses:
        text = f"The table of [the demo](demo.md). {taken()}"
        fill_and_keep(options.report / "quality.md", "demo-when", text)


if __name__ == "__main__":
    main()

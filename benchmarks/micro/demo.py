"""Tables of what ``lossycoll demo`` has written: python -m benchmarks.micro.demo FILE --report docs

``lossycoll demo`` is the table of demo.md. Of other losses (``lossycoll demo --loss 0.01 --steps
80``), ``--losses`` has the change of perplexity and of bytes, in quality.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.common.tables import Table, add_report, fill_and_keep, taken
from lossycoll.cli.demo.methods import methods

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


def table(results: Mapping[str, Any]) -> tuple[Table, list[list[str]]]:
    """A column for each run, a row for each figure."""
    runs: dict[str, Run] = results["runs"]
    heads = [
        f"{name}, {run['injected_loss']:.0%} lost" if run["injected_loss"] else name
        for name, run in runs.items()
    ]

    def traffic(name: str, scale: float = 1.0) -> Callable[[Run], str]:
        # gloo moves its bytes by TCP and does not count them.
        return lambda run: f"{run['traffic'][name] * scale:,.0f}" if run["traffic"] else "-"

    def expected(run: Run) -> str:
        found = run["drift"]["expected"]
        return "grows" if found is None else f"{found:.3g}"

    rows: dict[str, Callable[[Run], str]] = {
        "validation loss, nats per byte": lambda run: f"{run['validation_loss']:.4f}",
        "perplexity per byte (rank 0)": lambda run: f"{run['perplexity']:.3f}",
        "against gloo": lambda run: f"{run['perplexity_change_percent']:+.2f}%",
        "step time p50, p99, ms": lambda run: f"{run['step_ms_p50']:.1f}, {run['step_ms_p99']:.1f}",
        "packets sent": traffic("packets_sent"),
        "dropped by injection": traffic("packets_injected"),
        "given up as missing": traffic("packets_missing"),
        "MB sent": traffic("bytes_sent", 1e-6),
        "distance of the replicas, squared, second half": lambda run: (
            f"{run['drift']['mean_square_distance']:.3g}"
        ),
        "by theory": expected,
        "its root over the parameter norm": lambda run: f"{run['drift']['relative_rms']:.3%}",
    }
    out = Table("demo.md", "demo", " | ".join(["figure", *heads]), dated=False)
    return out, [[label, *map(show, runs.values())] for label, show in rows.items()]


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
    parser.add_argument("file", type=Path, help="demo.json")
    parser.add_argument("--losses", action="store_true", help="rows of quality.md")
    add_report(parser, "demo.md, or quality.md")
    options = parser.parse_args()
    results = json.loads(options.file.read_text(encoding="utf-8"))
    out, rows = (LOSSES, losses(results)) if options.losses else table(results)
    print(out.report(options.report, rows))
    if options.report and not options.losses:
        text = f"The table of [the demo](demo.md). {taken()}"
        fill_and_keep(options.report / "quality.md", "demo-when", text)


if __name__ == "__main__":
    main()

"""Measure all-reduce over sizes, several backends side by side in the same processes.

Bandwidths are defined as in nccl-tests: algorithm bandwidth is the tensor's bytes over the
time, bus bandwidth is that times 2 * (ranks - 1) / ranks.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lossycoll.arguments import inject_text, names, real, whole
from lossycoll.demo_report import percentile
from lossycoll.launch import EXIT_FAILED, launch, must_be_writable, scratch
from lossycoll.options import FAST_PATHS
from lossycoll.pictures import drawn

BACKENDS = ("lossy", "gloo")
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
DEFAULT_SIZES = "4k,16k,64k,256k,1m,4m,25m,100m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", type=names(BACKENDS), default=BACKENDS, help="default: lossy,gloo")
    add("--ranks", type=whole(2, 64), default=2, help="processes (default 2)")
    add("--sizes", type=sizes, default=sizes(DEFAULT_SIZES), help=f"default: {DEFAULT_SIZES}")
    add("--dtype", choices=DTYPES, default="float32")
    add("--seconds", type=real(0.01), default=3.0, help="time for each size (default 3)")
    add("--loss", type=real(0, 1), default=0.0, help="share of packets to drop (default 0)")
    add("--burst", type=real(1), default=1.0, help="mean length of a loss, in packets (default 1)")
    add("--seed", type=whole(0, 2**31 - 1), default=7, help="of the injected loss")
    add("--mtu", type=whole(576, 65535), help="largest packet; the interface's by default")
    add("--delivery", choices=("lossy", "reliable"), default="lossy")
    add("--algorithm", choices=("auto", "ring", "transpose"), default="auto")
    add("--disable", type=names(FAST_PATHS), default=(), help="fast paths to do without")
    add("--no-verify", action="store_true", help="do not check results (they are at zero loss)")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--out", type=Path, help="also write the JSON to this file")
    add("--report", type=Path, help="folder for bench.json, with every time, and bench.png")


def sizes(text: str) -> tuple[int, ...]:
    """``4k,1m``: sizes in bytes, with binary units."""
    out = []
    for part in text.lower().split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([kmg]?)(?:i?b)?\s*", part)
        if found is None or not 8 <= int(found[1]) * UNITS[found[2]] <= UNITS["g"]:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size from 8 to 1g, such as 64k")
        # A multiple of eight is a whole number of elements of every dtype.
        out.append(int(found[1]) * UNITS[found[2]] // 8 * 8)
    return tuple(out)


def run(options: argparse.Namespace) -> int:
    if options.out:
        must_be_writable(options.out)
    if options.report:
        must_be_writable(options.report / "bench.json", make_folder=True)
    # With --json, standard output carries the JSON and nothing else.
    console, errors = Console(stderr=options.json), Console(stderr=True)
    config = {
        "backends": options.backend,
        "sizes": options.sizes,
        "dtype": options.dtype,
        "seconds": options.seconds,
        "verify": not options.no_verify and not options.loss,
    }
    environment = {
        "LOSSYCOLL_INJECT": inject_text(options.loss, options.burst, options.seed),
        "LOSSYCOLL_DELIVERY": options.delivery,
        "LOSSYCOLL_ALGORITHM": options.algorithm,
    }
    # What was not asked for stays as the user's environment has it.
    if options.disable:
        environment["LOSSYCOLL_DISABLE"] = ",".join(options.disable)
    if options.mtu:
        environment["LOSSYCOLL_MTU"] = str(options.mtu)
    progress = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with scratch("lossycoll-bench-") as folder:
        with progress:
            task = progress.add_task("starting ranks", total=len(options.sizes))

            def on_event(event: dict[str, Any]) -> None:
                label = "all-reduce " + human(event["bytes"])
                progress.update(task, description=label, completed=event["done"])

            launch(
                "lossycoll.bench_rank",
                config,
                ranks=options.ranks,
                folder=folder,
                environment=environment,
                on_event=on_event,
            )
        measured = json.loads((folder / "ranks.json").read_text(encoding="utf-8"))
    results = summarize(measured, options)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(results))
    else:
        console.print(table(results))
    if options.report:
        report(measured, results, options.report, errors)
    wrong = [row for row in results["rows"] if row["verified"] is False]
    for row in wrong:
        errors.print(f"lossycoll bench: {row['backend']} is wrong at {human(row['bytes'])}")
    return EXIT_FAILED if wrong else 0


def summarize(measured: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A row per size and backend, with the ratio of lossy's bandwidth to gloo's."""
    factor = 2 * (options.ranks - 1) / options.ranks
    rows: list[dict[str, Any]] = []
    for entry in measured["sizes"]:
        medians = {name: percentile(times, 0.5) for name, times in entry["seconds"].items()}
        for name, times in entry["seconds"].items():
            bandwidth = entry["bytes"] / medians[name] / 1e9
            both = {"lossy", "gloo"} <= medians.keys()
            rows.append(
                {
                    "bytes": entry["bytes"],
                    "backend": name,
                    "iterations": len(times),
                    "median_ms": 1e3 * medians[name],
                    "p99_ms": 1e3 * percentile(times, 0.99),
                    "algbw_gb_s": bandwidth,
                    "busbw_gb_s": bandwidth * factor,
                    "lossy_over_gloo": medians["gloo"] / medians["lossy"] if both else None,
                    "verified": entry["verified"].get(name),
                }
            )
    chosen = {
        name: getattr(options, name)
        for name in (
            *("ranks", "dtype", "seconds", "loss", "burst", "seed"),
            *("mtu", "delivery", "algorithm", "disable"),
        )
    }
    return {"options": chosen, "traffic": measured["traffic"], "rows": rows}


def report(
    measured: dict[str, Any], results: dict[str, Any], folder: Path, errors: Console
) -> None:
    """bench.json and bench.png: the results with the seconds of every iteration."""
    seconds = {
        (entry["bytes"], name): times
        for entry in measured["sizes"]
        for name, times in entry["seconds"].items()
    }
    rows = [{**row, "seconds": seconds[row["bytes"], row["backend"]]} for row in results["rows"]]
    whole_results = {**results, "rows": rows}
    (folder / "bench.json").write_text(json.dumps(whole_results) + "\n", encoding="utf-8")
    if drawn("bench_plot", errors, whole_results, human, folder / "bench.png"):
        errors.print(f"report: {folder}", markup=False)


def table(results: dict[str, Any]) -> Table:
    chosen = results["options"]
    title = f"all-reduce, {chosen['ranks']} ranks, {chosen['dtype']}; bandwidths in GB/s"
    out = Table(title=title, box=None, padding=(0, 2, 0, 0))  # fits 80 columns
    headings = ("size", "backend", "runs", "median ms", "p99 ms", "algbw", "busbw")
    for heading in (*headings, "lossy/gloo", "result"):
        left = heading == "backend"
        out.add_column(heading, justify="left" if left else "right", no_wrap=True)
    before = None
    for row in results["rows"]:
        first = row["bytes"] != before
        before = row["bytes"]
        ratio = row["lossy_over_gloo"]
        out.add_row(
            human(row["bytes"]) if first else "",
            row["backend"],
            str(row["iterations"]),
            f"{row['median_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            f"{row['algbw_gb_s']:.3f}",
            f"{row['busbw_gb_s']:.3f}",
            f"{ratio:.2f}x" if first and ratio is not None else "",
            {True: "right", False: "WRONG", None: "-"}[row["verified"]],
        )
    traffic = results["traffic"]
    if traffic is not None:
        out.caption = "lossy: " + ", ".join(
            f"{traffic[name]:,} {name.replace('_', ' ')}" for name in traffic
        )
    return out


def human(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"

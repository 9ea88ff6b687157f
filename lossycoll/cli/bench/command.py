"""Measure all-reduce over sizes, several backends side by side in the same processes.

Bandwidths are defined as in nccl-tests: algorithm bandwidth is the tensor's bytes over the
time, bus bandwidth is that times 2 * (ranks - 1) / ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lossycoll.cli.answer import (
    EXIT_FAILED,
    Answer,
    Unwritable,
    add_json,
    console_of,
    give,
    must_be_writable,
    numbers_table,
    pyplot,
    save,
)
from lossycoll.cli.argtypes import human, inject_text, names, real, share, shares, size, whole
from lossycoll.cli.demo.report import percentile
from lossycoll.cli.launcher import launch, progress, scratch
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.backends import missing
from lossycoll.options.texts import FAST_PATHS
from lossycoll.plan import algorithm_names
from lossycoll.plan.codec import ENCODINGS, PAIRS

from . import nccl as bench_nccl

BACKENDS = ("lossy", "nccl", "gloo")
DEFAULT_BACKENDS = ("lossy", "gloo")
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
DEFAULT_SIZES = "4k,16k,64k,256k,1m,4m,25m,100m"
NCCL_TESTS = "nccl-tests"
"""Names the sizes of ``all_reduce_perf -b 8 -e 128M -f 2``."""
MBIT, ONE_WAY_MS = 1000.0, 10.0
NETWORK = Network(
    link=Link(delay_ms=ONE_WAY_MS), port=Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=25.0)
)
"""The laboratory's network: a good wide-area path, as in benchmarks/studies/lossy_links."""
MOST_BYTES = 1 << 20
"""Bytes that gloo carries over such a path within a second or two at 1%."""
LOSS_TIME, STEP_TIME = 3, 10
"""Factor of time for a loss and for steps, relative to a size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", type=names(BACKENDS), default=DEFAULT_BACKENDS, help="default: lossy,gloo")
    add("--ranks", type=whole(2, 64), default=2, help="processes (default 2)")
    others = f"{NCCL_TESTS} is 8 to 128m by twos, the default with nccl"
    add("--sizes", type=sizes, help=f"default: {DEFAULT_SIZES}; {others}")
    add("--dtype", choices=DTYPES, default="float32")
    add("--seconds", type=real(0.01), default=3.0, help="time for each size (default 3)")
    how = "compute before a call of the second half; 0: calls in a loop only (default 5)"
    add("--compute-ms", type=real(0, 1000), default=5.0, help=how)
    add("--loss", type=share, default=0.0, help="share of packets to drop (default 0)")
    add("--burst", type=real(1), default=1.0, help="mean length of a loss, in packets (default 1)")
    add("--seed", type=whole(0, 2**31 - 1), default=7, help="of the injected loss")
    add("--mtu", type=whole(576, 65535), help="largest packet; the interface's by default")
    add("--delivery", choices=("lossy", "reliable"), default="lossy")
    add("--algorithm", choices=algorithm_names("all_reduce"), default="auto")
    wires = (*ENCODINGS, *PAIRS)
    how = "how lossy's packets carry floats, as the option wire, by UDP (link)"
    add("--wire", choices=wires, metavar="WIRE", default="same", help=how)
    add("--disable", type=names(FAST_PATHS), default=(), help="fast paths to do without")
    add("--no-verify", action="store_true", help="do not check results (they are at zero loss)")
    add_json(parser)
    add("--out", type=Path, help="also write the JSON to this file")
    add("--report", type=Path, help="folder for bench.json, with every time, and bench.png")
    how = "of the report's time against loss (default %(default)s)"
    add("--losses", type=shares, default="0,0.001,0.01,0.05", help=how)
    add("--dry-run", action="store_true", help="say what would be run, and what it lacks")


def sizes(text: str) -> tuple[int, ...]:
    """``4k,1m``: sizes in bytes, with binary units; ``nccl-tests``: its own."""
    if text == NCCL_TESTS:
        return tuple(8 << doubled for doubled in range(25))
    # A multiple of eight is a whole number of elements of every dtype.
    return tuple(size(8, 1 << 30)(part) // 8 * 8 for part in text.split(","))


def run(options: argparse.Namespace) -> int:
    if options.sizes is None:
        options.sizes = sizes(NCCL_TESTS if "nccl" in options.backend else DEFAULT_SIZES)
    if options.dry_run:
        return dry_run(options)
    must_be_writable(options.out)
    if options.report:
        must_be_writable(options.report / "bench.json", make_folder=True)
    console = console_of(options)
    config, environment = configuration(options), environment_of(options)
    measured = measure(config, options.ranks, environment, console)
    results = summarize(measured, options)
    errors = Console(stderr=True)
    wrong = [row for row in results["rows"] if row["verified"] is False]
    for row in wrong:
        errors.print(f"lossycoll bench: {row['backend']} is wrong at {human(row['bytes'])}")
    said = [table(results), *labels(results)]
    answer = Answer(results, said, status=EXIT_FAILED if wrong else 0)
    unsaved = None
    try:
        give(answer, options, file=options.out)
    except Unwritable as error:  # which is no reason to lose the report
        unsaved = error
    if options.report:
        loss = None
        if options.backend != ("nccl",):  # which has no ranks on the CPU
            with console.status("time against loss") as shown:
                loss = against_loss(options, config, environment, shown.update)
        report(measured, results, loss, options.report, errors)
    if unsaved is not None:
        raise unsaved
    return answer.status


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "backends": options.backend,
        "sizes": options.sizes,
        "dtype": options.dtype,
        "seconds": options.seconds,
        "compute_seconds": options.compute_ms / 1e3,
        "verify": not options.no_verify and not options.loss,
        "step_seconds": 0,
    }


def environment_of(options: argparse.Namespace) -> dict[str, str | None]:
    environment = {
        "LOSSYCOLL_INJECT": inject_text(options.loss, options.burst, options.seed),
        "LOSSYCOLL_DELIVERY": options.delivery,
        "LOSSYCOLL_ALGORITHM": options.algorithm,
    }
    # What was not asked for stays as the user's environment has it.
    if options.disable:
        environment["LOSSYCOLL_DISABLE"] = ",".join(options.disable)
    if options.wire != "same":
        environment |= {"LOSSYCOLL_WIRE": options.wire, "LOSSYCOLL_LINK": "udp"}
    if options.mtu:
        environment["LOSSYCOLL_MTU"] = str(options.mtu)
    return environment


def dry_run(options: argparse.Namespace) -> int:
    """Says what would be run on this machine; 1 where something that it takes is missing."""
    chosen, count = options.sizes, len(options.sizes)
    print(
        f"would run: all-reduce of {options.dtype} by {', '.join(options.backend)} in turns, "
        f"{options.ranks} ranks on this machine, {count} sizes from {human(min(chosen))} to "
        f"{human(max(chosen))}, about {options.seconds:g} s each"
    )
    if "nccl" not in options.backend:
        return 0
    try:
        setup = bench_nccl.choose([bench_nccl.look()] * options.ranks)
    except bench_nccl.NcclMissing as error:
        print(error)
        return EXIT_FAILED
    print("\n".join(bench_nccl.describe(setup)))
    return 0


def measure(
    config: Mapping[str, Any],
    ranks: int,
    environment: Mapping[str, str | None],
    console: Console,
) -> dict[str, Any]:
    """Measures with ranks on this machine (worker.take_part); progress goes to ``console``.
    Raises LaunchError when one fails, NcclMissing before the start where NCCL can't run."""
    if "nccl" in config["backends"]:
        bench_nccl.choose([bench_nccl.look()] * ranks)
    with progress(console, "bench", len(config["sizes"])) as on_event:
        return run_ranks(config, ranks, environment, on_event)


def run_ranks(
    config: Mapping[str, Any],
    ranks: int,
    environment: Mapping[str, str | None],
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    on: Network | None = None,
) -> dict[str, Any]:
    """What the benchmark's ranks measure: on this machine, or each on a host of a laboratory."""
    with contextlib.ExitStack() as undo:
        found: dict[str, Any] = launch(
            "lossycoll.cli.bench.worker",
            config,
            ranks=ranks,
            folder=undo.enter_context(scratch("lossycoll-bench-")),
            environment=environment,
            on_event=on_event,
            lab=None if on is None else undo.enter_context(Lab(on)),
        )
        return found


def against_loss(
    options: argparse.Namespace,
    config: Mapping[str, Any],
    environment: Mapping[str, str | None],
    on_loss: Callable[[str], None],
) -> dict[str, Any]:
    """A row per loss and backend, and steps of training at the loss in the middle.

    The ranks are on the hosts of a laboratory, where packets of TCP are lost as well. Without one,
    loss is injected into what the lossy backend receives, which gloo doesn't feel.
    """
    lacking = missing("switch")
    nbytes = min(MOST_BYTES, max(options.sizes))
    middle = options.losses[len(options.losses) // 2]
    rows: list[dict[str, Any]] = []
    steps: dict[str, list[float]] = {}
    injected = 0
    for loss in options.losses:
        on_loss(f"time against loss: {loss:.3g}")
        own = {
            **config,
            "backends": [name for name in options.backend if name != "nccl"],
            "sizes": (nbytes,),
            "seconds": LOSS_TIME * options.seconds,
            "verify": False,
            "compute_seconds": 0,
            "step_seconds": STEP_TIME * options.seconds if loss == middle else 0,
        }
        inject = inject_text(loss, 1, options.seed) if lacking else None
        found = run_ranks(
            own,
            options.ranks,
            {**environment, "LOSSYCOLL_INJECT": inject},
            on=None if lacking else NETWORK.with_parts(hosts=options.ranks, loss=loss),
        )
        steps = found["steps"] or steps
        injected += (found["traffic"] or {}).get("packets_injected", 0)
        rows += [
            {"loss": loss, "backend": name, **summary(times), "seconds": times}
            for name, times in found["sizes"][0]["seconds"].items()
        ]
    told = f"laboratory, {MBIT:g} Mbit/s, {2 * ONE_WAY_MS:g} ms there and back, all packets alike"
    if lacking:
        told = "loss injected into what lossy receives; gloo's TCP loses nothing"
    return {
        "network": told,
        "without_laboratory": lacking,
        "injected": injected,
        "bytes": nbytes,
        "rows": rows,
        "steps": {"loss": middle, "seconds": steps},
    }


CHOSEN = (
    *("ranks", "dtype", "seconds", "compute_ms", "loss", "burst", "seed"),
    *("mtu", "delivery", "algorithm", "wire", "disable"),
)
"""Options that are among the results."""


def summarize(measured: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "options": {name: getattr(options, name) for name in CHOSEN},
        **{name: measured[name] for name in ("traffic", "measured", "nccl")},
        "rows": rows_of(measured, options.ranks),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": 1e3 * percentile(seconds, 0.5),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
    }


def rows_of(measured: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """A row per size and backend, with the ratios of lossy's bandwidth to the others'. Bandwidths
    and ratios are of calls in a loop. ``wrong``: elements that differ from the sum, in two checks
    at all ranks; None where unchecked."""
    factor = 2 * (ranks - 1) / ranks
    rows: list[dict[str, Any]] = []
    for entry in measured["sizes"]:
        medians = {name: percentile(times, 0.5) for name, times in entry["seconds"].items()}
        for name, times in entry["seconds"].items():
            bandwidth = entry["bytes"] / medians[name] / 1e9
            over: dict[str, float | None] = {"lossy_over_gloo": None, "lossy_over_nccl": None}
            if "lossy" in medians:
                for other in medians.keys() - {"lossy"}:
                    over[f"lossy_over_{other}"] = medians[other] / medians["lossy"]
            wrong = entry["wrong"].get(name)
            after = entry["after_compute"].get(name)
            rows.append(
                {
                    "bytes": entry["bytes"],
                    "backend": name,
                    "iterations": len(times),
                    **summary(times),
                    "after_compute_ms": 1e3 * percentile(after, 0.5) if after else None,
                    "algbw_gb_s": bandwidth,
                    "busbw_gb_s": bandwidth * factor,
                    **over,
                    "wrong": wrong,
                    "verified": None if wrong is None else wrong == 0,
                }
            )
    return rows


def report(
    measured: dict[str, Any],
    results: dict[str, Any],
    loss: dict[str, Any] | None,
    folder: Path,
    errors: Console,
) -> None:
    """bench.json and bench.png: the results with the seconds of every iteration, and what
    against_loss has found."""
    seconds = [times for entry in measured["sizes"] for times in entry["seconds"].values()]
    pairs = zip(results["rows"], seconds, strict=True)
    rows = [{**row, "seconds": times} for row, times in pairs]
    whole_results = {**results, "rows": rows, "loss": loss}
    save(folder / "bench.json", json.dumps(whole_results))
    if (plt := pyplot(errors)) is not None:
        from .plot import draw

        draw(plt, whole_results, folder / "bench.png")
        errors.print(f"report: {folder}", markup=False)


def table(results: dict[str, Any]) -> Table:
    chosen = results["options"]
    title = f"all-reduce, {chosen['ranks']} ranks, {chosen['dtype']}; bandwidths in GB/s"
    others = [name for name in ("gloo", "nccl") if name in results["measured"]]
    out = numbers_table(  # fits 80 columns
        "size",
        Column("backend", no_wrap=True),
        *("runs", "loop ms", "p99 ms", "after ms", "busbw"),
        *(f"lossy/{name}" for name in others),
        "result",
        title=title,
        caption=caption(results),
    )
    before = None
    for row in results["rows"]:
        first = row["bytes"] != before
        before = row["bytes"]
        ratios = [row[f"lossy_over_{name}"] if first else None for name in others]
        out.add_row(
            human(row["bytes"]) if first else "",
            row["backend"],
            str(row["iterations"]),
            f"{row['median_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            "-" if row["after_compute_ms"] is None else f"{row['after_compute_ms']:.3f}",
            f"{row['busbw_gb_s']:.3f}",
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            {True: "right", False: "WRONG", None: "-"}[row["verified"]],
        )
    return out


def caption(results: dict[str, Any]) -> str:
    """What the columns mean, and the lossy group's packets."""
    said = "loop: median of calls in a loop"
    if compute := results["options"]["compute_ms"]:
        said += f"; after: of calls after {compute:g} ms of compute"
    if traffic := results["traffic"]:
        counts = (f"{count:,} {name.replace('_', ' ')}" for name, count in traffic.items())
        said += "\nlossy: " + ", ".join(counts)
    return said


def labels(results: dict[str, Any]) -> list[str]:
    """Labels of the backends, in words, where there is more to say than their names."""
    nccl = results["nccl"]
    if nccl is None:
        return []
    lines = [f"{name}: {label}" for name, label in results["measured"].items()]
    how = ", ".join(nccl["transports"]) or "its account doesn't say what"
    return [*lines, f"NCCL {nccl['version']} on {nccl['gpu']}, connected by {how}"]

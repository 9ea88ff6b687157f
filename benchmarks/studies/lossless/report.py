"""Tables, clean.json and clean.png of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import markdown, publish
from lossycoll.cli.argtypes import human

from . import plot, verdict
from .cells import MIB, RAW, RAW_BASE, RAW_SIZES, WIRES, goal
from .verdict import bus, cpu_per_gb, raw_share

Row = dict[str, Any]
README_ROW = ("all_reduce", 25 * MIB)


def write(entries: Sequence[Result], folder: Path) -> str:
    """clean.json, clean.png, and the tables between the marks of performance.md; returns the rows
    of README.md's table that are of loopback."""
    order = {wire: number for number, wire in enumerate(WIRES)}
    entries = sorted(entries, key=lambda e: (e.settings["ranks"], order[e.settings["wire"]]))
    found = [asdict(entry) for entry in entries]
    publish(folder, "clean", found, "performance.md", tables(entries), partial(plot.draw, entries))
    return "\n".join(readme_rows(entries))


def readme_rows(entries: Sequence[Result]) -> Iterator[str]:
    for entry in part(entries, "collectives"):
        for row in entry.figures["rows"]:
            if entry.settings["wire"] == "lo" and (row["collective"], row["bytes"]) == README_ROW:
                ranks, variants = entry.settings["ranks"], row["variants"]
                times = (f"{1e3 * variants[name]['p50']:.1f} ms" for name in ("gloo", "lossy"))
                yield f"| all-reduce of 25 MiB over loopback, {ranks} ranks | {' | '.join(times)} |"


def tables(entries: Sequence[Result]) -> dict[str, str]:
    return {
        "clean-verdict": "\n".join(f"- {line}" for line in verdict.lines(entries)),
        "clean-all-reduce": collective_table(entries, ("all_reduce",)),
        "clean-others": collective_table(entries, ("broadcast", "all_gather")),
        "clean-raw": raw_table(entries),
        "clean-trials": trial_table(entries),
        "clean-paths": path_table(entries),
        "clean-memory": memory_table(entries),
        "clean-when": when(entries),
    }


def part(entries: Iterable[Result], name: str) -> list[Result]:
    return [entry for entry in entries if entry.settings["part"] == name]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def collective_table(entries: Sequence[Result], collectives: Sequence[str]) -> str:
    head = ["wire, ranks", "size", "lossy: p50, p99, ms", "bus GB/s", "gloo: p50, p99, ms"]
    head += ["bus GB/s", "times gloo", "goal", "CPU s/GB: lossy, gloo"]
    out = []
    for entry in part(entries, "collectives"):
        for row in entry.figures["rows"]:
            if row["collective"] not in collectives:
                continue
            named = row["collective"] + ", " if len(collectives) > 1 else ""
            lossy, gloo = row["variants"]["lossy"], row["variants"]["gloo"]
            wanted = goal(row["collective"], entry.settings["ranks"], row["bytes"])
            small = row["bytes"] < MIB
            out.append(
                [
                    f"{named}{entry.settings['wire']}, {entry.settings['ranks']}",
                    human(row["bytes"]),
                    f"{ms(lossy['p50'])}, {ms(lossy['p99'])}",
                    "" if small else f"{bus(entry, row, 'lossy'):.2f}",
                    f"{ms(gloo['p50'])}, {ms(gloo['p99'])}",
                    "" if small else f"{bus(entry, row, 'gloo'):.2f}",
                    f"{gloo['p50'] / lossy['p50']:.2f}x",
                    "half the time" if wanted is None else f"{wanted:g}x",
                    ""
                    if small
                    else f"{cpu_per_gb(entry, row, 'lossy'):.2f}, "
                    f"{cpu_per_gb(entry, row, 'gloo'):.2f}",
                ]
            )
    return markdown(head, out)


def raw_table(entries: Sequence[Result]) -> str:
    sizes = [human(size) for size in RAW_SIZES]
    head = ["wire", "bare sockets, GB/s each way", "CPU s/GB"]
    head += [f"all-reduce of {size}, bus GB/s" for size in sizes]
    head += [f"share, {size}" for size in sizes]
    out = []
    for entry in part(entries, "raw"):
        base = entry.figures["raw"][RAW_BASE]
        by_size = {row["bytes"]: row for row in entry.figures["rows"]}
        cells = [entry.settings["wire"], f"{base['gb_per_s']:.2f}", f"{base['cpu_s_per_gb']:.2f}"]
        cells += [f"{bus(entry, by_size[size], 'lossy'):.2f}" for size in RAW_SIZES]
        out.append(cells + [f"{raw_share(entry, size):.0%}" for size in RAW_SIZES])
    return markdown(head, out)


def trial_table(entries: Sequence[Result]) -> str:
    found = part(entries, "raw")
    wires = [entry.settings["wire"] for entry in found]
    head = ["bare sockets", *(f"{wire}: GB/s, CPU s/GB" for wire in wires)]
    head += [f"{wire}: round trip p50, p99, us" for wire in wires]
    out = []
    for name in RAW if found else ():
        rates = [entry.figures["raw"][name] for entry in found]
        cells = [name, *(f"{one['gb_per_s']:.2f}, {one['cpu_s_per_gb']:.2f}" for one in rates)]
        for entry in found:
            ping = entry.figures["pings"].get(name)
            cells.append(f"{ping['p50_us']:.1f}, {ping['p99_us']:.1f}" if ping else "")
        out.append(cells)
    return markdown(head, out)


def path_table(entries: Sequence[Result]) -> str:
    """Times with each fast path off, and against all on."""
    found = part(entries, "paths")
    columns = [(entry, row) for entry in found for row in entry.figures["rows"]]
    head = ["switched off"]
    head += [f"{e.settings['wire']}, {human(row['bytes'])}, ms" for e, row in columns]
    out = []
    for variant in columns[0][1]["variants"] if columns else ():
        cells = [variant if variant in ("nothing", "all") else f"`{variant}`"]
        for _, row in columns:
            one, base = row["variants"][variant]["p50"], row["variants"]["nothing"]["p50"]
            cells.append(ms(one) if variant == "nothing" else f"{ms(one)} ({one / base:.2f}x)")
        out.append(cells)
    return markdown(head, out)


def memory_table(entries: Sequence[Result]) -> str:
    head = ["", "bucket", "peak beyond the tensors, MiB", "in buckets"]
    head += ["operations", "resident before, after, MiB", "threads, descriptors more"]
    out = []
    for entry in part(entries, "memory"):
        for variant in entry.figures["ranks"][0]:
            ranks = [rank[variant] for rank in entry.figures["ranks"]]
            before = max(ranks, key=lambda r: r["after"]["resident"] - r["before"]["resident"])
            more = [
                max(r["after"][what] - r["before"][what] for r in ranks)
                for what in ("threads", "descriptors")
            ]
            for number, size in enumerate(ranks[0]["peaks"]):
                peak = max(rank["peaks"][size] for rank in ranks)
                held = [before[when]["resident"] / MIB for when in ("before", "after")]
                out.append(
                    [
                        variant,
                        human(int(size)),
                        f"{peak / MIB:.1f}",
                        f"{peak / int(size):.2f}",
                        "" if number else f"{ranks[0]['operations']:,}",
                        "" if number else f"{held[0]:.1f}, {held[1]:.1f}",
                        "" if number else f"{more[0]}, {more[1]}",
                    ]
                )
    return markdown(head, out)


def when(entries: Sequence[Result]) -> str:
    """Commits and dates of the lines that the tables are made of."""
    said = sorted({f"{entry.date} at commit {entry.commit}" for entry in entries})
    return f"Measured on {'; '.join(said)}; 2 cores, x86-64." if said else "Not measured."

"""Tables, clean.json and clean.png of what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.quality.report import between, markdown
from lossycoll.cli.bench.command import human

from . import verdict
from .cells import MIB, RAW, RAW_BASE, RAW_SIZES, WIRES, goal
from .rates import bus, cpu_per_gb, raw_share

Entry = dict[str, Any]
Row = dict[str, Any]


def write(entries: Sequence[Entry], folder: Path) -> None:
    """clean.json, clean.png, and the tables between the marks of performance.md."""
    order = {wire: number for number, wire in enumerate(WIRES)}
    entries = sorted(entries, key=lambda e: (e["job"]["ranks"], order[e["job"]["wire"]]))
    (folder / "clean.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    page = folder / "performance.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables(entries).items():
        text = between(text, name, table)
    page.write_text(text, encoding="utf-8")
    from . import plot

    plot.draw(entries, folder / "clean.png")


def tables(entries: Sequence[Entry]) -> dict[str, str]:
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


def part(entries: Iterable[Entry], name: str) -> list[Entry]:
    return [entry for entry in entries if entry["job"]["part"] == name]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def collective_table(entries: Sequence[Entry], collectives: Sequence[str]) -> str:
    head = ["wire, ranks", "size", "lossy: p50, p99, ms", "bus GB/s", "gloo: p50, p99, ms"]
    head += ["bus GB/s", "times gloo", "goal", "CPU s/GB: lossy, gloo"]
    out = []
    for entry in part(entries, "collectives"):
        for row in entry["found"]["rows"]:
            if row["collective"] not in collectives:
                continue
            named = row["collective"] + ", " if len(collectives) > 1 else ""
            lossy, gloo = row["ways"]["lossy"], row["ways"]["gloo"]
            wanted = goal(row["collective"], entry["job"]["ranks"], row["bytes"])
            small = row["bytes"] < MIB
            out.append(
                [
                    f"{named}{entry['job']['wire']}, {entry['job']['ranks']}",
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


def raw_table(entries: Sequence[Entry]) -> str:
    sizes = [human(size) for size in RAW_SIZES]
    head = ["wire", "bare sockets, GB/s each way", "CPU s/GB"]
    head += [f"all-reduce of {size}, bus GB/s" for size in sizes]
    head += [f"share, {size}" for size in sizes]
    out = []
    for entry in part(entries, "raw"):
        base = entry["found"]["raw"][RAW_BASE]
        by_size = {row["bytes"]: row for row in entry["found"]["rows"]}
        cells = [entry["job"]["wire"], f"{base['gb_per_s']:.2f}", f"{base['cpu_s_per_gb']:.2f}"]
        cells += [f"{bus(entry, by_size[size], 'lossy'):.2f}" for size in RAW_SIZES]
        out.append(cells + [f"{raw_share(entry, size):.0%}" for size in RAW_SIZES])
    return markdown(head, out)


def trial_table(entries: Sequence[Entry]) -> str:
    found = part(entries, "raw")
    wires = [entry["job"]["wire"] for entry in found]
    head = ["bare sockets", *(f"{wire}: GB/s, CPU s/GB" for wire in wires)]
    head += [f"{wire}: round trip p50, p99, us" for wire in wires]
    out = []
    for name in RAW if found else ():
        rates = [entry["found"]["raw"][name] for entry in found]
        cells = [name, *(f"{one['gb_per_s']:.2f}, {one['cpu_s_per_gb']:.2f}" for one in rates)]
        for entry in found:
            ping = entry["found"]["pings"].get(name)
            cells.append(f"{ping['p50_us']:.1f}, {ping['p99_us']:.1f}" if ping else "")
        out.append(cells)
    return markdown(head, out)


def path_table(entries: Sequence[Entry]) -> str:
    """Times with each fast path off, and against all on."""
    found = part(entries, "paths")
    columns = [(entry, row) for entry in found for row in entry["found"]["rows"]]
    head = ["switched off"]
    head += [f"{e['job']['wire']}, {human(row['bytes'])}, ms" for e, row in columns]
    out = []
    for way in columns[0][1]["ways"] if columns else ():
        cells = [way if way in ("nothing", "all") else f"`{way}`"]
        for _, row in columns:
            one, base = row["ways"][way]["p50"], row["ways"]["nothing"]["p50"]
            cells.append(ms(one) if way == "nothing" else f"{ms(one)} ({one / base:.2f}x)")
        out.append(cells)
    return markdown(head, out)


def memory_table(entries: Sequence[Entry]) -> str:
    head = ["", "bucket", "peak beyond the tensors, MiB", "in buckets"]
    head += ["operations", "resident before, after, MiB", "threads, descriptors more"]
    out = []
    for entry in part(entries, "memory"):
        for way in entry["found"]["ranks"][0]:
            ranks = [rank[way] for rank in entry["found"]["ranks"]]
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
                        way,
                        human(int(size)),
                        f"{peak / MIB:.1f}",
                        f"{peak / int(size):.2f}",
                        "" if number else f"{ranks[0]['operations']:,}",
                        "" if number else f"{held[0]:.1f}, {held[1]:.1f}",
                        "" if number else f"{more[0]}, {more[1]}",
                    ]
                )
    return markdown(head, out)


def when(entries: Sequence[Entry]) -> str:
    """Commits and dates of the lines that the tables are made of."""
    said = sorted({f"{entry['date']} at commit {entry['commit']}" for entry in entries})
    return f"Measured on {'; '.join(said)}; 2 cores, x86-64." if said else "Not measured."

"""Results in nccl-tests' columns: a block of time, bandwidths and errors for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.common.tables import fill, write_json
from lossycoll.cli.bench.command import DTYPES, labels

TYPES = {"float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16"}
"""As nccl-tests names them."""


def write(results: Sequence[Result], folder: Path) -> str:
    """nccl.json, and the tables in performance.md; returns these."""
    if not results:
        raise ValueError("nothing was measured yet")
    text = "\n\n".join(table(result) for result in results)
    write_json(folder / "nccl.json", [{**vars(result)} for result in results])
    fill(folder / "performance.md", {"nccl": f"```\n{text}\n```"})
    return text


def table(result: Result) -> str:
    """Lines that begin with # are about it. Times are medians of calls that were waited for one by
    one, where nccl-tests has the mean of calls that were issued together."""
    results, dtype = result.figures, result.settings["dtype"]
    names = list(results["measured"])
    said = labels(results) or [f"{name}: {what}" for name, what in results["measured"].items()]
    lines = [f"# all_reduce, {result.settings['ranks']} ranks, {result.date}, {result.commit}"]
    lines += [f"# {line}" for line in said]
    empty = " " * 40
    lines.append(f"#{empty}" + "".join(f"{name:^34}" for name in names))
    head = f"{'size':>12}{'count':>12}{'type':>10}{'redop':>6}"
    lines.append(f"#{head}" + f"{'time':>10}{'algbw':>9}{'busbw':>9}{'wrong':>6}" * len(names))
    units = f"{'(B)':>12}{'(elements)':>12}{'':16}"
    lines.append(f"#{units}" + f"{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}{'':6}" * len(names))
    by_size: dict[int, dict[str, Any]] = {}
    for row in results["rows"]:
        by_size.setdefault(row["bytes"], {})[row["backend"]] = row
    for size, own in by_size.items():
        cells = f" {size:>12}{size // DTYPES[dtype]:>12}{TYPES[dtype]:>10}{'sum':>6}"
        lines.append(cells + "".join(block(own[name]) for name in names))
    for name in names:
        found = [row["busbw_gb_s"] for row in results["rows"] if row["backend"] == name]
        lines.append(f"# average bus bandwidth, {name}: {sum(found) / len(found):.3f} GB/s")
    return "\n".join(lines)


def block(row: dict[str, Any]) -> str:
    wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
    times = f"{1e3 * row['median_ms']:>10.2f}"
    return times + f"{row['algbw_gb_s']:>9.3f}{row['busbw_gb_s']:>9.3f}{wrong:>6}"

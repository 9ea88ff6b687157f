"""The tables and the picture: residual loss against overhead, and the time on a long path."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import Result
from benchmarks.common.tables import fill, markdown, write_json
from lossycoll.plan.sets import ROWS, USUAL, Code

from .cells import VARIANTS, left

MARKS: Final = {
    "fec=auto": "*",
    "max_missing=0.01": "o",
    "the same, repair=0": "^",
    "repair=1": "s",
    "fec=0.1, repair=1": "D",
}
MOST_ROWS: Final = 16
"""Of the curves, to a quarter of the data."""
LEAST_SHOWN: Final = 1e-4
"""Percent: less is too little to be measured."""
LEFT_OUT: Final = 1 / 3
"""Of each series of times: the first operations find the path's rate."""


def write(entries: Sequence[Result], folder: Path) -> None:
    """fec.json, fec.png, and the tables between the marks of performance.md; before the first
    result nothing, so that what is there stays."""
    if not entries:
        return
    residual = [one for one in entries if one.settings["part"] == "residual"]
    rows = [{**one.settings, **one.figures} for one in residual]
    lab = [one for one in entries if one.settings["part"] == "lab"]
    path = folder / "fec.json"
    # A part that has no results yet stays as it is.
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if rows:
        found["residual"] = {"commits": sorted({one.commit for one in residual}), "rows": rows}
    if lab:
        found["lab"] = {"commits": [lab[-1].commit], "variants": lab[-1].figures}
    report(found, folder)


def report(found: Mapping[str, Any], folder: Path) -> None:
    """What :func:`write` writes, of the figures of fec.json."""
    tables = {}
    if "residual" in found:
        tables["fec"] = table(found["residual"]["rows"])
        draw(found["residual"]["rows"], folder / "fec.png")
    if "lab" in found:
        tables["fec-lab"] = lab_table(found["lab"]["variants"])
    write_json(folder / "fec.json", found)
    fill(folder / "performance.md", tables)


def _cell(row: Mapping[str, Any]) -> str:
    wanted = "" if row["predicted"] is None else f" ({_share(row['predicted'])})"
    return f"{_share(row['residual'])}{wanted} for {row['overhead']:.1%}"


def _share(value: float) -> str:
    return f"{100 * value:.2g}%" if value < 0.1 else f"{100 * value:.3g}%"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    measured = {row["variant"] for row in rows}
    variants = [variant for variant in VARIANTS if variant in measured]
    head = ["lost", *variants]
    out = []
    for loss, burst in dict.fromkeys((row["loss"], row["burst"]) for row in rows):
        cells = {r["variant"]: _cell(r) for r in rows if (r["loss"], r["burst"]) == (loss, burst)}
        name = f"{loss:.1%}" + (f" in bursts of {burst}" if burst > 1 else "")
        out.append([name, *(cells.get(variant, "") for variant in variants)])
    return markdown(head, out)


def lab_table(variants: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, variant in variants.items():
        times = sorted(variant["seconds"][int(LEFT_OUT * len(variant["seconds"])) :])
        median, longest = statistics.median(times), times[-1]
        rows.append(
            [name, f"{1e3 * median:.0f}", f"{1e3 * longest:.0f}", _share(variant["missing"])],
        )
    return markdown(["", "median, ms", "longest, ms", "missing"], rows)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel for single losses, one for bursts; a colour for each loss."""
    bursts = list(dict.fromkeys(row["burst"] for row in rows))
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    size = (5.2 * len(bursts) + 1.8, 4.2)
    figure, axes = plt.subplots(1, len(bursts), figsize=size, layout="constrained", sharey=True)
    colours = plt.colormaps["viridis"].resampled(5).colors  # type: ignore[attr-defined]
    for axis, burst in zip(axes, bursts, strict=True):
        for loss, colour in zip(losses, colours, strict=False):
            here = {r["variant"]: r for r in rows if (r["loss"], r["burst"]) == (loss, burst)}
            fixed = [row for variant, row in here.items() if variant not in MARKS]
            axis.plot(*_points(fixed), "o-", color=colour, markersize=4, label=f"{loss:.1%} lost")
            for variant, mark in MARKS.items():
                shown = [here[variant]] if variant in here else []
                axis.plot(*_points(shown), mark, color=colour, markersize=8)
            rows_of = ROWS[1 : MOST_ROWS + 1]
            wanted = [100 * left(loss, burst, Code(USUAL, rows)) for rows in rows_of]
            axis.plot([100 * rows / USUAL for rows in rows_of], wanted, ":", color=colour)
        axis.set_yscale("log")
        axis.set_ylim(LEAST_SHOWN, 20)
        axis.set_title("single losses" if burst == 1 else f"bursts of {burst} on average")
        axis.set_xlabel("packets sent besides, %")
    for variant, mark in MARKS.items():
        axes[-1].plot([], [], mark, color="black", label=variant)
    axes[-1].plot([], [], ":", color="black", label="parity, by the formula")
    axes[0].set_ylabel("packets still missing, %")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save(figure, path, dpi=100)


def _points(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Nothing missing has no place on a logarithmic axis."""
    shown = [row for row in rows if row["missing"]]
    return [100 * row["overhead"] for row in shown], [100 * row["residual"] for row in shown]

"""The ranks' figures as one: what a line of the results holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lossycoll.cli.demo.report import percentile

SHARES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}


def summarize(part: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if part == "memory":
        return {"ranks": list(ranks)}
    found: dict[str, Any] = {
        "rows": rows([rank["rows"] for rank in ranks]),
        "missing": sum(rank["missing"] for rank in ranks),
    }
    if part == "raw":
        found["raw"] = {
            name: {
                figure: statistics.median(
                    statistics.mean(one[figure] for one in ends)
                    for ends in zip(*(rank["raw"][name] for rank in ranks), strict=True)
                )
                for figure in ("gb_per_s", "cpu_s_per_gb")
            }
            | {"lost": sum(one["lost"] for rank in ranks for one in rank["raw"][name])}
            | {"zero_copies": sum(one["zero_copies"] for one in ranks[0]["raw"][name])}
            | {"copied": sum(one["copied"] for one in ranks[0]["raw"][name])}
            for name in ranks[0]["raw"]
        }
        # Of the end that asks: the other one's times hold the waits between questions.
        found["pings"] = {
            name: next(rank["pings"][name] for rank in ranks if rank["pings"][name]["asks"])
            for name in ranks[0]["pings"]
        }
    return found


def rows(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per collective and size, what was measured of it in several turns together. A call's
    time is the mean over the ranks, as nccl-tests has it."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for turn in zip(*ranks, strict=True):
        first = turn[0]
        row = merged.setdefault(
            (first["collective"], first["bytes"]),
            {"collective": first["collective"], "bytes": first["bytes"], "variants": {}},
        )
        for variant in first["seconds"]:
            kept = row["variants"].setdefault(variant, {"seconds": [], "cpu": [], "right": True})
            for figure in ("seconds", "cpu"):
                of_ranks = zip(*(one[figure][variant] for one in turn), strict=True)
                kept[figure] += [statistics.mean(values) for values in of_ranks]
            kept["right"] = kept["right"] and all(one["right"][variant] for one in turn)
    for row in merged.values():
        row["variants"] = {variant: _figures(kept) for variant, kept in row["variants"].items()}
    return list(merged.values())


def _figures(kept: dict[str, Any]) -> dict[str, Any]:
    """``cpu``: the mean, in seconds per call and rank; medians of small ones hide the rare ones."""
    quantiles = {name: percentile(kept["seconds"], share) for name, share in SHARES.items()}
    return {
        "calls": len(kept["seconds"]),
        **quantiles,
        "cpu": statistics.mean(kept["cpu"]),
        "right": kept["right"],
    }

"""Reads a file of recorded times, and says what is wrong with one, and where.

The file is ``{"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds": number}``.
A rank may have fewer micro-batches than another. Other keys are ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import OptionError
from .times import Times, checked

SHAPE: Final = '{"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds": number}'


@dataclass(frozen=True)
class Recorded:
    """Recorded times.

    Attributes:
        times: Seconds of each micro-batch, float64 [steps, ranks, micro-batches]; NaN at the tail
            of a rank's step if the rank had fewer.
        communication: Seconds of a step that are not compute.
    """

    times: Times
    communication: float


def load(path: Path) -> Recorded:
    """Reads recorded times.

    Args:
        path: A JSON file, as :func:`parse` takes its content.

    Returns:
        What the file has.

    Raises:
        OptionError: The file can't be read or can't be right; names the place in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON: {error}; wanted: {SHAPE}") from None
    try:
        return parse(content)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def parse(content: Any) -> Recorded:
    """The recorded times in a decoded file; the OptionError names step, rank and micro-batch."""
    if not isinstance(content, dict):
        raise OptionError(f"{_kind(content)} at the top; wanted: {SHAPE}")
    for key in ("micro_batch_seconds", "communication_seconds"):
        if key not in content:
            there = ", ".join(repr(name) for name in content) or "no key"
            raise OptionError(f"there is no {key!r} but {there}; wanted: {SHAPE}")
    communication = _seconds(
        content["communication_seconds"],
        "communication_seconds",
        "a step's seconds without its compute (step time less the slowest rank's micro-batches)",
    )
    steps = _list(content["micro_batch_seconds"], "micro_batch_seconds", "steps")
    rows = [_step(ranks, number) for number, ranks in enumerate(steps)]
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise OptionError(
                f"step {number} has {len(row)} ranks, step 0 has {len(rows[0])}; wanted: every "
                f"rank in every step, so leave out a step that a rank didn't record"
            )
    times = np.full((len(rows), len(rows[0]), max(len(b) for row in rows for b in row)), np.nan)
    for number, row in enumerate(rows):
        for rank, batches in enumerate(row):
            times[number, rank, : len(batches)] = batches
    return Recorded(checked(times), communication)


def _step(content: Any, step: int) -> list[list[float]]:
    """Seconds by rank and micro-batch."""
    ranks = _list(content, f"step {step}", "ranks")
    out = []
    for rank, batches in enumerate(ranks):
        where = f"step {step}, rank {rank}"
        out.append(
            [
                _seconds(
                    value,
                    f"{where}, micro-batch {number}",
                    "its compute time by a monotonic clock (leave out what wasn't recorded)",
                )
                for number, value in enumerate(_list(batches, where, "micro-batches"))
            ]
        )
    return out


def _list(value: Any, where: str, of: str) -> list[Any]:
    if not isinstance(value, list):
        raise OptionError(f"{where}: {_kind(value)}; wanted: a list of {of}, nested as in {SHAPE}")
    if not value:
        raise OptionError(f"{where}: an empty list; wanted: at least one of its {of}")
    return value


def _seconds(value: Any, where: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{where}: {_kind(value)}; wanted: a number of seconds, {what}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds < math.inf:
        raise OptionError(
            f"{where}: {seconds:g} s; wanted: a finite number of seconds >= 0, {what}"
        )
    return seconds


def _kind(value: Any) -> str:
    """A value of the wrong type, in JSON's words."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"the text {value[:20]!r}" if isinstance(value, str) else f"the number {value!r}"

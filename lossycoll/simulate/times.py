"""Recorded compute times, as an array and in files: which are valid, and which steps are outliers.

A file is ``{"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds": number}``.
A rank may have fewer micro-batches than another. Other keys are ignored.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import OptionError
from ..options.ranges import is_number, is_real

Times = NDArray[np.float64]


def checked(times: ArrayLike) -> Times:
    """Recorded times as float64 seconds, [steps, ranks, micro-batches]; else OptionError.

    NaN stands at the tail of a rank's step that had fewer micro-batches. Refused are another shape,
    a step without a micro-batch, a negative or infinite time, NaN before a number, and all zeros.
    """
    try:
        out = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError):
        raise OptionError(
            "times are not numbers of one shape; wanted: seconds, [steps, ranks, micro-batches], "
            "NaN at the tail where a rank had fewer micro-batches"
        ) from None
    if out.ndim != 3 or out.size == 0:
        raise OptionError(
            f"times have the shape {list(out.shape)}; wanted: [steps, ranks, micro-batches], "
            f"none of them 0"
        )
    absent = np.isnan(out)
    _refuse(out, ~absent & ~((out >= 0) & np.isfinite(out)))
    # A number after NaN: the NaN is no tail.
    holes = absent[:, :, :-1] & ~absent[:, :, 1:]
    _refuse(out[:, :, :-1], holes)
    empty = np.flatnonzero(absent.all(axis=(1, 2)))
    if empty.size:
        raise OptionError(
            f"step {empty[0]}: no rank has a micro-batch; leave out a step in which nothing was "
            f"computed"
        )
    if not np.nanmax(out) > 0:
        raise OptionError("all times are 0 s; wanted: a clock that can tell a micro-batch's")
    return out


def _refuse(times: Times, wrong: NDArray[np.bool_]) -> None:
    if wrong.any():
        step, rank, batch = np.argwhere(wrong)[0]
        raise OptionError(
            f"step {step}, rank {rank}, micro-batch {batch}: the time is "
            f"{times[step, rank, batch]:g} s; wanted: a finite number of at least 0 (take times "
            f"with a monotonic clock), or NaN from there to the end of the rank's step"
        )


def ends(times: Times) -> Times:
    """The time at which each micro-batch was completed, in seconds since its rank's step began."""
    return np.cumsum(times, axis=-1)


def compute_seconds(times: Times) -> Times:
    """The compute time of each step's slowest rank: seconds [steps]."""
    out: Times = np.nanmax(np.nansum(times, axis=2), axis=1)
    return out


def usual(times: Times) -> NDArray[np.bool_]:
    """Which steps are not outliers: bool [steps].

    Outliers are steps of more than 3 times the median, if they are at most one in 20 steps, or a
    single one: if there are more, the job is like that. Even the paper's heavy-tailed delay stays
    far below, because a step sums micro-batches and waits for all ranks.
    """
    compute = compute_seconds(times)
    slow = compute > 3 * np.median(compute)
    if slow.sum() > max(1, len(slow) // 20):
        return np.ones(len(slow), np.bool_)
    return ~slow


# ---- files ----

SHAPE: Final = '{"micro_batch_seconds": [step][rank][micro-batch], "communication_seconds": number}'


@dataclass(frozen=True)
class Recorded:
    """Seconds of each micro-batch, float64 [steps, ranks, micro-batches], with NaN at the tail of a
    rank's step if it had fewer, and seconds of a step that are not compute."""

    times: Times
    communication: float


def load(path: Path) -> Recorded:
    """Reads a file; OptionError names the place in it that can't be right."""
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
    steps = _nested(content["micro_batch_seconds"])
    for step, ranks in enumerate(steps):
        if len(ranks) != len(steps[0]):
            raise OptionError(
                f"step {step} has {len(ranks)} ranks, step 0 has {len(steps[0])}; wanted: every "
                f"rank in every step, so leave out a step that a rank didn't record"
            )
    most = max(len(batches) for ranks in steps for batches in ranks)
    padded = [[[*rank, *[math.nan] * (most - len(rank))] for rank in ranks] for ranks in steps]
    return Recorded(checked(padded), communication)


LEVELS: Final = ("step", "rank", "micro-batch")


def _nested(value: Any, *place: int) -> Any:
    """Lists of lists of lists of seconds. ``place``: step, rank and micro-batch of ``value``."""
    if len(place) == len(LEVELS) and is_real(value, 0, math.inf):
        return float(value)
    named = zip(LEVELS, place, strict=False)
    where = ", ".join(f"{name} {number}" for name, number in named) or "micro_batch_seconds"
    if len(place) == len(LEVELS):
        clock = "its compute time by a monotonic clock (leave out what wasn't recorded)"
        return _seconds(value, where, clock)
    of = ("steps", "ranks", "micro-batches")[len(place)]
    if not isinstance(value, list):
        raise OptionError(f"{where}: {_kind(value)}; wanted: a list of {of}, nested as in {SHAPE}")
    if not value:
        raise OptionError(f"{where}: an empty list; wanted: at least one of its {of}")
    return [_nested(one, *place, number) for number, one in enumerate(value)]


def _seconds(value: Any, where: str, what: str) -> float:
    if not is_number(value):
        raise OptionError(f"{where}: {_kind(value)}; wanted: a number of seconds, {what}")
    if not is_real(value, 0, math.inf):
        shown = math.inf if value > sys.float_info.max else value
        raise OptionError(f"{where}: {shown:g} s; wanted: a finite number of seconds >= 0, {what}")
    return float(value)


def _kind(value: Any) -> str:
    """A value of the wrong type, in JSON's words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return f"the text {value[:20]!r}"
    return f"the number {value!r}" if is_number(value) else json.dumps(value)

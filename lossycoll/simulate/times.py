"""Recorded compute times as an array: which ones are valid, and which steps are outliers."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import OptionError

Times = NDArray[np.float64]

OUTLIER: Final = 3.0
"""A step that is this many times slower than the median step may be an outlier. Even the paper's
heavy-tailed delay stays far below, because a step sums micro-batches and waits for all ranks."""
OUTLIERS: Final = 20
"""At most one step in this many is an outlier. If there are more, the job is like that."""


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
    out: Times = np.cumsum(times, axis=-1)
    return out


def compute_seconds(times: Times) -> Times:
    """The compute time of each step's slowest rank: seconds [steps]."""
    out: Times = np.nanmax(np.nansum(times, axis=2), axis=1)
    return out


def usual(times: Times) -> NDArray[np.bool_]:
    """Which steps are not outliers: bool [steps].

    Outliers are steps of more than OUTLIER times the median, if they are at most one in OUTLIERS
    steps, or a single one.
    """
    compute = compute_seconds(times)
    slow = compute > OUTLIER * np.median(compute)
    if slow.sum() > max(1, len(slow) // OUTLIERS):
        return np.ones(len(slow), np.bool_)
    out: NDArray[np.bool_] = ~slow
    return out

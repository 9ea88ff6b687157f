"""Gain of a threshold of compute time, predicted from recorded times or from a distribution.

``times`` checks recorded times, and reads files of them. ``threshold`` chooses by them, also for
another number of ranks. ``theory`` has distributions of a micro-batch's time, and the formulas.
Beside them stands ``averaging`` (rounds that a swarm needs). numpy alone: no torch, no
sockets, no clock.
"""

from .theory import (
    Empirical,
    Exponential,
    LogNormal,
    Noise,
    Normal,
    expected_maximum,
    fit,
    noise_curve,
    normal_curve,
)
from .threshold import Choice, Cut, Point, choose, choose_at, curve, grid
from .times import Recorded, load

__all__ = [
    "Choice",
    "Cut",
    "Empirical",
    "Exponential",
    "LogNormal",
    "Noise",
    "Normal",
    "Point",
    "Recorded",
    "choose",
    "choose_at",
    "curve",
    "expected_maximum",
    "fit",
    "grid",
    "load",
    "noise_curve",
    "normal_curve",
]

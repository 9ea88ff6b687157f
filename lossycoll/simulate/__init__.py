"""Training predicted before it runs: what waiting for the slowest rank costs, and what not waiting
gains. numpy alone: no torch, no sockets, no clock."""

from .noise import Delayed, Empirical, Exponential, LogNormal, Noise, Normal, fit
from .recorded import Recorded, load
from .scale import choose_at
from .theory import (
    best,
    completed_fraction,
    effective_speedup,
    expected_maximum,
    noise_curve,
    normal_curve,
)
from .threshold import Choice, Cut, Point, choose, curve, grid

__all__ = [
    "Choice",
    "Cut",
    "Delayed",
    "Empirical",
    "Exponential",
    "LogNormal",
    "Noise",
    "Normal",
    "Point",
    "Recorded",
    "best",
    "choose",
    "choose_at",
    "completed_fraction",
    "curve",
    "effective_speedup",
    "expected_maximum",
    "fit",
    "grid",
    "load",
    "noise_curve",
    "normal_curve",
]

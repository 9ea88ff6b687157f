"""What is trained for long, by the bytes of a step: all of them, and two levels below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..variants import Variant, arc, rank_of_powersgd

SEEDS = (1, 2, 3)
WORLD = 4
START = 10
"""All is sent whole in one of so many steps, the first ones, as PowerSGD's authors advise."""
SKETCH_DIM = 1
"""Rows of these models have 64 elements: sketches of four would be a sixteenth of the matrix."""
INT8 = "int8"
DENSE = "dense"


def rows(ratio: float, feedback: str, wire: str | None = None) -> Variant:
    return replace(arc(ratio, "lossy", feedback, sketch_dim=SKETCH_DIM, wire=wire), reliable=True)


def rows_of(method: str, ratio: float) -> Variant:
    """Rows by another choice than ARC's: a rank's own largest, or random ones."""
    return replace(arc(ratio, "lossy", "ef14", method=method), reliable=True)


def factors(rank: int, wire: str = "same") -> Variant:
    return replace(rank_of_powersgd(rank, "lossy", reliable=True), wire=wire)


LONG_VARIANTS: Mapping[str, Variant] = {
    DENSE: Variant("", "lossy", reliable=True),
    "ARC 0.2, none": rows(0.2, "none"),
    "ARC 0.2, ef14": rows(0.2, "ef14"),
    "ARC 0.2, ef21m": rows(0.2, "ef21m"),
    "ARC 0.2, int8, none": rows(0.2, "none", INT8),
    "ARC 0.2, int8, ef14": rows(0.2, "ef14", INT8),
    "ARC 0.05, none": rows(0.05, "none"),
    "ARC 0.05, ef14": rows(0.05, "ef14"),
    "ARC 0.045, ef14": rows(0.045, "ef14"),
    "Rand-K 0.2, ef14": rows_of("randk", 0.2),
    "Top-K 0.05, ef14": rows_of("topk", 0.05),
    "PowerSGD 3": factors(3),
    "PowerSGD 10": factors(10),
    "PowerSGD 11": factors(11),
    "PowerSGD 11, int8": factors(11, INT8),
    "PowerSGD 12, int8": factors(12, INT8),
}

Levels = Mapping[str, tuple[str, ...]]
LEVELS: Mapping[str, Levels] = {
    "gpt": {
        "all": (DENSE,),
        "a fifth": (
            *("PowerSGD 10", "ARC 0.2, none", "ARC 0.2, ef14", "ARC 0.2, ef21m"),
            *("Rand-K 0.2, ef14", "Top-K 0.05, ef14"),
        ),
        "a fifteenth": (
            *("PowerSGD 3", "ARC 0.2, int8, none", "ARC 0.2, int8, ef14"),
            *("ARC 0.05, none", "ARC 0.05, ef14", "PowerSGD 11, int8"),
        ),
    },
    "conv": {
        "all": (DENSE,),
        "a fifth": (
            *("PowerSGD 11", "ARC 0.2, ef14", "ARC 0.2, ef21m"),
            *("Rand-K 0.2, ef14", "Top-K 0.05, ef14"),
        ),
        "a fifteenth": (
            *("PowerSGD 3", "ARC 0.2, int8, ef14"),
            *("ARC 0.045, ef14", "PowerSGD 12, int8"),
        ),
    },
}
"""By task, what sends about that share of all bytes. SGD needs error feedback; what suits Adam is
to be seen."""


def planned() -> Iterator[tuple[int, str, str]]:
    """(seed, task, variant): a whole comparison for the first seed, then for the next."""
    for seed in SEEDS:
        for task, levels in LEVELS.items():
            for names in levels.values():
                for name in names:
                    yield seed, task, name

"""Types of command line arguments: each accepts a value or says what it wanted instead."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from lossycoll.plan.faults import fraction

_Value = TypeVar("_Value")


def _accepting(
    read: Callable[[str], _Value], is_good: Callable[[_Value], bool], wanted: str
) -> Callable[[str], _Value]:
    def parse(text: str) -> _Value:
        with contextlib.suppress(ValueError):
            value = read(text)
            if is_good(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def whole(least: int, most: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """A whole number in a range."""
    wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    if multiple_of != 1:
        wanted += f" that is a multiple of {multiple_of}"
    limit = math.inf if most is None else most
    return _accepting(int, lambda n: least <= n <= limit and not n % multiple_of, wanted)


def real(least: float, below: float = math.inf) -> Callable[[str], float]:
    """A finite number in a half-open range."""
    wanted = f"a number of at least {least:g}"
    if below != math.inf:
        wanted += f" and below {below:g}"
    # For nan every comparison is false.
    return _accepting(float, lambda value: least <= value < below, wanted)


def size(least: int, most: int) -> Callable[[str], int]:
    """``100M``: bytes, with binary units."""

    def read(text: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)(?:i?b)?", text.strip().lower())
        if found is None:
            raise ValueError(text)
        return int(float(found[1]) * 1024 ** " kmg".index(found[2] or " "))

    wanted = f"a size from {human(least)} to {human(most)}, such as 64k or 25M"
    return _accepting(read, lambda n: least <= n <= most, wanted)


share: Final = _accepting(
    fraction, lambda value: 0 <= value < 1, "a share of at least 0 and below 1, as in 0.01 or 1%"
)
"""``0.01`` or ``1%``."""


def shares(text: str) -> tuple[float, ...]:
    """``0,0.01`` or ``0,1%``: shares of packets, each below 1, in rising order."""
    found = tuple(share(part) for part in text.split(","))
    if list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text!r} doesn't rise")
    return found


def names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Some of the known names, separated by commas, none of them twice."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(part.strip() for part in text.split(","))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        if len(set(chosen)) != len(chosen):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return chosen

    return parse


def human(size: int) -> str:
    """A size in bytes, as people write it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def inject_text(
    loss: float, burst: float, seed: int, links: Mapping[tuple[int, int], float] | None = None
) -> str | None:
    """The value of LOSSYCOLL_INJECT for this much loss; ``links``: by (sender, receiver)."""
    parts = [f"loss={loss:g}"] if loss else []
    parts += [f"link={a}-{b}:{share:g}" for (a, b), share in (links or {}).items()]
    if not parts:
        return None
    return ",".join([*parts, *([f"burst={burst:g}"] if burst > 1 else []), f"seed={seed}"])

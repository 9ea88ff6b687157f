"""Types of command line arguments: each accepts a value or says what it wanted instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

from lossycoll.options.ranges import is_whole
from lossycoll.plan.faults import fraction


def whole(least: int, most: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """A whole number in a range."""
    wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    if multiple_of != 1:
        wanted += f" that is a multiple of {multiple_of}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if not is_whole(value, least, math.inf if most is None else most) or value % multiple_of:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def real(least: float, below: float | None = None) -> Callable[[str], float]:
    """A finite number in a half-open range."""
    wanted = f"a number of at least {least:g}" + ("" if below is None else f" and below {below:g}")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        # Written so that nan, for which every comparison is false, is refused as well.
        if not least <= value < (float("inf") if below is None else below):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def share(text: str) -> float:
    """``0.01`` or ``1%``: a share below 1."""
    try:
        value = fraction(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:  # refuses nan as well
        wanted = "a share of at least 0 and below 1, as in 0.01 or 1%"
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


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


def inject_text(
    loss: float, burst: float, seed: int, links: Mapping[tuple[int, int], float] | None = None
) -> str | None:
    """The value of LOSSYCOLL_INJECT for this much loss; ``links``: by (sender, receiver)."""
    parts = [f"loss={loss:g}"] if loss else []
    parts += [f"link={a}-{b}:{share:g}" for (a, b), share in (links or {}).items()]
    if not parts:
        return None
    return ",".join([*parts, *([f"burst={burst:g}"] if burst > 1 else []), f"seed={seed}"])

"""What single losses leave, by theory."""

from __future__ import annotations

from lossycoll.options.fields import Options

from .cells import VARIANTS


def left(loss: float, size: int) -> float:
    """What single losses leave with sets of ``size`` and their parity: a packet is missing if it
    is lost and one of the others of its set or the parity is, too."""
    return loss * (1 - (1 - loss) ** size)


def predicted(variant: str, loss: float) -> float | None:
    """What single losses leave with a variant; None where no formula is given."""
    options = Options(**VARIANTS[variant])
    size, auto = options.parity_sets
    if auto or (size and options.repair):
        return None
    return left(loss, size) if size else loss ** (1 + options.repair)

"""What single losses leave, by theory."""

from __future__ import annotations

from math import comb

from lossycoll.options.fields import Options
from lossycoll.plan.sets import Code

from .cells import VARIANTS


def left(loss: float, code: Code) -> float:
    """What single losses leave of long streams: a packet is missing if it is lost, and as many of
    the others of its set and its rows as there are rows."""
    others = code.size + code.rows - 1
    back = sum(
        comb(others, lost) * loss**lost * (1 - loss) ** (others - lost) for lost in range(code.rows)
    )
    return loss * (1 - back)


def predicted(variant: str, loss: float) -> float | None:
    """What single losses leave with a variant; None where no formula is given."""
    options = Options(**VARIANTS[variant])
    code, most_parity, _ = options.parity
    if most_parity or (code.rows and options.repair):
        return None
    return left(loss, code) if code.rows else loss ** (1 + options.repair)

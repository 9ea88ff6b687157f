"""What a loss leaves, by theory."""

from __future__ import annotations

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.plan.sets import Code
from tests.oracle import recovery
from tests.oracle.parity import shape_of

from .cells import STREAM, VARIANTS


def left(loss: float, burst: float, code: Code) -> float:
    """What a code leaves of a stream of the study."""
    fitted = code.fitted(STREAM)
    shape = shape_of(fitted, STREAM)
    columns = int(np.bincount(shape.of_data)[0])
    sets = int(shape.of_data[: shape.window].max()) + 1
    return recovery.left(loss, burst, columns, fitted.rows, sets)


def predicted(variant: str, loss: float, burst: float) -> float | None:
    """What a loss leaves with a variant; None where no formula is given."""
    options = Options(**VARIANTS[variant])
    code, most_parity, _ = options.parity
    if most_parity or (code.rows and options.repair):
        return None
    return left(loss, burst, code) if code.rows else loss ** (1 + options.repair)

"""Pictures, where matplotlib is there to draw them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rich.console import Console


def drawn(module: str, errors: Console, *what: Any) -> bool:
    """Calls ``draw`` of a module that needs matplotlib.

    Args:
        module: Its full name. It is imported here, so that a command runs without matplotlib.
        errors: Where a line says why there is no picture.
        *what: Arguments of ``draw``.

    Returns:
        Whether there is a picture: False where matplotlib is missing.
    """
    try:
        draw = import_module(module).draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        errors.print('no plot: matplotlib is missing (pip install "lossycoll[demo]")', markup=False)
        return False
    draw(*what)
    return True

"""Pictures, where matplotlib is there to draw them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rich.console import Console


def drawn(module: str, errors: Console, *what: Any) -> bool:
    """Calls ``draw(*what)`` of a module of this package; False, and a line that says why, without
    matplotlib."""
    try:
        draw = import_module(f".{module}", __package__).draw
    except ImportError:
        errors.print('no plot: matplotlib is missing (pip install "lossycoll[demo]")', markup=False)
        return False
    draw(*what)
    return True

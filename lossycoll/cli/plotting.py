"""Pictures, where matplotlib is there to draw them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from lossycoll.errors import OptionError

from .launcher import must_be_writable


def drawn(module: str, errors: Console, *what: Any) -> bool:
    """Calls ``draw`` of a module that needs matplotlib."""
    try:
        draw = import_module(module).draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        errors.print('no plot: matplotlib is missing (pip install "lossycoll[demo]")', markup=False)
        return False
    draw(*what)
    return True


def must_be_png(picture: Path | None) -> None:
    """Refuses a file for a picture that isn't a PNG, or can't be written."""
    if picture is None:
        return
    if picture.suffix.lower() != ".png":
        raise OptionError(f"--picture {picture}: not a .png; pictures are PNG")
    must_be_writable(picture)

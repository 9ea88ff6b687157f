"""Pictures, where matplotlib is there to draw them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from lossycoll.errors import OptionError

from .launcher import must_be_writable


def pyplot(errors: Console) -> Any:
    """matplotlib.pyplot, for files alone; None, which ``errors`` hears of, where there is none."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        errors.print('no plot: matplotlib is missing (pip install "lossycoll[demo]")', markup=False)
        return None
    matplotlib.use("Agg")  # There may be no display.
    from matplotlib import pyplot

    return pyplot


def must_be_png(picture: Path | None) -> None:
    """Refuses a file for a picture that isn't a PNG, or can't be written."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise OptionError(f"--picture {picture}: not a .png; pictures are PNG")
    must_be_writable(picture)

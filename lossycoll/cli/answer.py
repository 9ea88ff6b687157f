"""What a command says in the end: an answer or the reason for none, JSON or tables, a picture."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lossycoll.errors import OptionError

EXIT_FAILED = 1
EXIT_USAGE = 2  # as argparse's
EXIT_INTERRUPTED = 130
"""Status that a shell reports for a program that SIGINT ended."""


class CommandError(RuntimeError):
    """The reason why a command ends, in one line, and the program's exit status."""

    status = EXIT_FAILED


class Unwritable(CommandError):
    """There is no writing to where the results are to go."""

    status = EXIT_USAGE


@dataclass(frozen=True)
class Answer:
    """Answer of a command: JSON's data, or tables and lines; a picture's drawing, which is given
    pyplot and the file; the exit status."""

    data: Any
    said: Sequence[Any]
    draw: Callable[[Any, Path], None] | None = None
    status: int = 0
    width: int = 0  # least columns that the tables take


def add_json(parser: argparse.ArgumentParser) -> None:
    how = "print the result as JSON, not as a table"
    parser.add_argument("--json", action="store_true", help=how)


def console_of(options: argparse.Namespace) -> Console:
    """With --json, standard output carries the JSON and nothing else."""
    return Console(stderr=options.json)


def give(
    answer: Answer,
    options: argparse.Namespace,
    *,
    file: Path | None = None,
    picture: Path | None = None,
) -> int:
    """Prints an answer, writes its data to ``file``, draws ``picture``, and returns the status."""
    console = console_of(options)
    console.width = max(console.width, answer.width)
    if options.json:
        print(json.dumps(_finite(answer.data)))
    else:
        for one in answer.said:
            # Text is there to be copied.
            is_whole = isinstance(one, Text)
            console.print(one, markup=False, highlight=False, soft_wrap=is_whole)
    if file is not None:
        save(file, json.dumps(_finite(answer.data), indent=1), answer.status)
    if picture and answer.draw and (plt := pyplot(Console(stderr=True))) is not None:
        answer.draw(plt, picture)
        plt.close("all")
        console.print(f"picture: {picture}", markup=False, highlight=False)
    return answer.status


def _finite(data: Any) -> Any:
    """The same data, with None for the numbers that JSON has no word for."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def numbers_table(*columns: str | Column, **how: Any) -> Table:
    """A table without lines, whose columns are numbers unless they say otherwise."""
    made = (
        Column(one, justify="right", no_wrap=True) if isinstance(one, str) else one
        for one in columns
    )
    return Table(*made, box=None, padding=(0, 2, 0, 0), **how)


def must_be_writable(file: Path | None, *, make_folder: bool = False) -> None:
    """Raises Unwritable when ``file`` can't be written, which is better known before a long run.
    Tried out, not looked up: permissions say nothing of a full or odd file system."""
    if file is None:
        return
    try:
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        before = file.exists()
        file.open("a").close()
        if not before:
            file.unlink()
    except OSError as error:
        raise Unwritable(f"cannot write to {file}: {error.strerror}") from error


def save(file: Path, text: str, status: int = 0) -> None:
    """Writes results that have been printed. Unwritable has the command's ``status``, where it
    tells of a failure of the command itself."""
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        unsaved = Unwritable(f"{file} can't be written: {error.strerror}")
        unsaved.status = status or EXIT_USAGE
        raise unsaved from None


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

    pyplot.rc("figure.constrained_layout", use=True)
    pyplot.rc("savefig", dpi=110)
    pyplot.rc("axes", grid=True)
    pyplot.rc("grid", alpha=0.3)
    return pyplot


def must_be_png(picture: Path | None) -> None:
    """Refuses a file for a picture that isn't a PNG, or can't be written."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise OptionError(f"--picture {picture}: not a .png; pictures are PNG")
    must_be_writable(picture)

"""``lossycoll simulate``: what each of its parts answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


class Answer(NamedTuple):
    """Answer of a part: JSON's data, or tables and lines; a picture's drawing; the exit status."""

    data: Any
    said: Sequence[Any]
    draw: Callable[[Any, Path], None] | None = None
    status: int = 0


def tracked(points: Sequence[T]) -> Iterable[T]:
    """The points, with a bar of progress on a terminal."""
    errors = Console(stderr=True)
    hidden = not errors.is_terminal
    return track(points, "simulating", console=errors, transient=True, disable=hidden)

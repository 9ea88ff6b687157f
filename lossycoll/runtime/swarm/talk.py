"""A peer's connection with a directory: what has been heard and said over it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .protocol import Turn
from .ways import Session
from .whereabouts import Place


@dataclass(slots=True)
class Talk:
    """One connection. ``said``: what has been said over it; ``heard``, ``beat``: when something
    last came, and this peer last gave a sign of life; ``names``: of peers, of which more come."""

    session: Session
    place: Place
    coming: str
    heard: float
    beat: float = 0.0
    answered: bool = False
    ended: bool = False
    turns: Turn | None = None
    names: tuple[str, ...] = ()
    said: list[object] = field(default_factory=list)

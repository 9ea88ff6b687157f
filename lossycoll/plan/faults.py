"""Seeded faults that are injected: the option ``inject``, read and checked.

Which packets are lost is a pure function of (seed, group, op, slot, sender, receiver, round,
packet): native/inject.c, and tests/oracle/masks.py in numpy. Links may differ in their loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from .rng import MASK

NAMES: Final = ("loss", "link", "burst", "dup", "reorder", "seed")
_READERS: Final[Mapping[str, Callable[[str], float]]] = {"seed": int, "burst": float}
"""Readers of the values that are no shares."""


class LinkLoss(NamedTuple):
    """Packets from rank ``sender`` to rank ``receiver`` (of the group) are lost at ``loss``."""

    sender: int
    receiver: int
    loss: float

    def __str__(self) -> str:
        return f"link={self.sender}-{self.receiver}:{self.loss:g}"


@dataclass(frozen=True)
class Inject:
    """Injected faults: loss, duplicates and reordering. Between bursts at least one packet arrives,
    so loss <= burst / (burst + 1) unless it is 1."""

    loss: float = 0.0  # fraction of packets lost
    burst: float = 1.0  # mean number of packets lost in a row; 1: each packet is lost independently
    dup: float = 0.0  # fraction of packets delivered twice
    reorder: float = 0.0  # fraction of packets delivered after their successor
    seed: int = 0  # 64 bits
    links: tuple[LinkLoss, ...] = ()  # links with a loss of their own

    def __post_init__(self) -> None:
        for name in ("loss", "dup", "reorder"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, wanted 0 to 1")
        if not (self.burst >= 1 and math.isfinite(self.burst)):
            raise ValueError(f"burst is {self.burst}, wanted a number of 1 or more")
        if not (isinstance(self.seed, int) and 0 <= self.seed <= MASK):
            raise ValueError(f"seed is {self.seed}, wanted an integer, 0 to 2**64 - 1")
        for link in self.links:
            if not 0 <= link.loss <= 1:
                raise ValueError(f"loss in {link} is {link.loss}, wanted 0 to 1")
            if link.sender < 0 or link.sender == link.receiver:
                raise ValueError(f"{link}: wanted two ranks that differ")
            if sum(link[:2] == other[:2] for other in self.links) > 1:
                raise ValueError(f"link={link.sender}-{link.receiver} is given twice")
        for loss in (self.loss, *(link.loss for link in self.links)):
            if self.burst > 1 and loss < 1 and begin(loss, 1 / self.burst) > 1 + 1e-9:
                raise ValueError(
                    f"burst is {self.burst}, wanted at least {loss / (1 - loss):.6g} for "
                    f"loss {loss}: shorter bursts can't lose so many packets"
                )

    def loss_of(self, sender: int, receiver: int) -> float:
        return next((x.loss for x in self.links if x[:2] == (sender, receiver)), self.loss)

    def check_world(self, world: int) -> None:
        """Raises ValueError unless a group of ``world`` ranks has the ranks of all links."""
        for link in self.links:
            rank = max(link.sender, link.receiver)
            if rank >= world:
                raise ValueError(
                    f"{link} names rank {rank}, wanted ranks of the group, 0 to {world - 1}"
                )


def parse(text: str) -> Inject:
    """Reads ``"loss=0.1,link=0-1:0.3,burst=8,seed=7,dup=0.01,reorder=0.01"``.

    Any part may be left out; ``link`` may be there as often as there are links. The ValueError
    names the part that is wrong.
    """
    found: dict[str, float | int] = {}
    links: list[LinkLoss] = []
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"{part.strip()!r} in {text!r}"
        if not equals or name not in NAMES:
            raise ValueError(f"{where}: wanted name=value with a known name")
        if name in found:
            raise ValueError(f"{where}: {name} is given twice")
        try:
            if name == "link":
                links.append(_link(value))
            else:
                found[name] = _READERS.get(name, fraction)(value)
        except ValueError:
            kind = {"link": "FROM-TO:LOSS", "seed": "an integer"}.get(name, "a number")
            raise ValueError(f"{where}: {name} is {value!r}, wanted {kind}") from None
    try:
        return Inject(**found, links=tuple(links))  # type: ignore[arg-type]  # seed is an int
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def fraction(text: str) -> float:
    """The share that ``"0.01"`` and ``"1%"`` both say, else ValueError. A caller checks its
    range."""
    number, percent, rest = text.strip().partition("%")
    if rest:
        raise ValueError(f"{text!r} is no number")
    return float(number) / 100 if percent else float(number)


def _link(text: str) -> LinkLoss:
    found = re.fullmatch(r"\s*([0-9]+)\s*-\s*([0-9]+)\s*:(.*)", text)
    if found is None:
        raise ValueError
    return LinkLoss(int(found[1]), int(found[2]), fraction(found[3]))


def begin(loss: float, end: float) -> float:
    """Chance that a burst begins after a packet that arrived, if one ends with chance ``end``."""
    return loss * end / (1 - loss)

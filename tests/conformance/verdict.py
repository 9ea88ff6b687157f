"""What results say: where lossy does other than gloo, and whether that was known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .exceptions import EXCEPTIONS, Excuse
from .runner import Outcome

Run = Mapping[str, Outcome]
"""The outcome of each test in one mode at one world size."""


@dataclass(frozen=True)
class Contradiction:
    """``text`` says what is not as it was known to be."""

    test: str
    mode: str
    world: int
    text: str

    def __str__(self) -> str:
        return f"{self.test} ({self.mode}, {self.world} ranks): {self.text}"


def contradictions(
    gloo: Run, lossy: Run, mode: str, world: int, exceptions: Mapping[str, Excuse] = EXCEPTIONS
) -> list[Contradiction]:
    """Where gloo passes and ``lossy`` doesn't, unless it is known, or is known but no longer so."""
    found = []
    for test, outcome in lossy.items():
        known = exceptions.get(test)
        excused = known is not None and mode in known.modes
        if gloo[test].kind != "pass":
            continue
        if outcome.kind != "pass" and not excused:
            text = f"{outcome.kind} where gloo passes: {outcome.reason}"
            found.append(Contradiction(test, mode, world, text))
        elif outcome.kind == "pass" and excused and not known.sometimes:
            text = "passes, although it is listed as an exception"
            found.append(Contradiction(test, mode, world, text))
    return found

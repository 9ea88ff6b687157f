"""Recovery of lost packets that a method of training asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.ranges import is_whole

MAX_MISSING: Final = 0.01
"""Which share of the packets may be missing, where nobody says otherwise. Twice as many stale
blocks have no measurable cost in quality (docs/quality.md); a path that loses no more needs
nothing."""
MOST_REPAIR: Final = 255
MEANS: Final = ("max_missing", "repair", "fec")
"""Options that say what is brought back, or how."""


@dataclass(frozen=True)
class Recovery:
    """Rounds of resending and bounds on loss for collectives that can lose packets."""

    # the share of packets that may be missing; None: as ``repair`` leaves
    max_missing: float | None = None
    repair: int | None = None  # rounds of resending; None: as the group has it
    # whether the user has said so. Otherwise what the group was given goes first.
    asked: bool = True

    @classmethod
    def of(cls, max_missing: float | None, repair: int | None) -> Recovery:
        """The recovery that a method's arguments ask for; else OptionError.

        ``max_missing`` is MAX_MISSING unless one of the two is given; ``repair`` is in rounds.
        """
        if repair is not None and not is_whole(repair, 0, MOST_REPAIR):
            raise OptionError(
                f"repair is {repair!r}, wanted a number of rounds, 0 to {MOST_REPAIR}, or None"
            )
        if max_missing is None:
            return cls(None if repair is not None else MAX_MISSING, repair, repair is not None)
        if isinstance(max_missing, str):
            raise OptionError(f"max_missing is {max_missing!r}, wanted a share, 0 to 1, or None")
        Options(max_missing=max_missing)  # refuses what the option refuses
        return cls(max_missing, repair)

    def changes(self, options: Options, *, exact: bool) -> dict[str, Any]:
        """The options that a call is made with, besides those in force.

        Without ``exact`` a scope or the group may ask for more rounds, and what it was given goes
        before what nobody asked for.
        """
        changes: dict[str, Any] = {}
        if self.repair is not None:
            changes["repair"] = self.repair if exact else max(self.repair, options.repair)
        given = any(options.is_given(name) for name in MEANS)
        if self.max_missing is not None and (exact or self.asked or not given):
            changes["max_missing"] = self.max_missing
        return changes


NOTHING_ASKED: Final = Recovery()
"""Recovery by the group's options."""

"""Delivery that a method of training asks for: recovery of lost packets, and encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.ranges import is_whole
from lossycoll.options.scopes import scope
from lossycoll.plan import codec
from lossycoll.runtime.engine.codecs import rounded

Mask: TypeAlias = NDArray[np.bool_]

MAX_MISSING: Final = 0.01
"""Which share of the packets may be missing, where nobody says otherwise. Twice as many stale
blocks have no measurable cost in quality (docs/quality.md); a path that loses no more needs
nothing."""
MOST_REPAIR: Final = 255
MEANS: Final = ("max_missing", "repair", "fec")  # options that say what is brought back, or how


@dataclass(frozen=True)
class Recovery:
    """Rounds of resending and bounds on loss for collectives that can lose packets."""

    # the share of packets that may be missing; None: as ``repair`` leaves
    max_missing: float | None = None
    repair: int | None = None  # rounds of resending; None: as the group has it
    # whether the user has said so. Otherwise what the group was given goes first.
    asked: bool = True
    exact: bool = False  # whether it holds as it is, whatever the group was given
    whole_packets: bool = False  # whether packets of short calls are as large as others

    @classmethod
    def of(cls, max_missing: float | None, repair: int | None, *, exact: bool = False) -> Recovery:
        """The recovery that a method's arguments ask for; else OptionError."""
        if repair is not None and not is_whole(repair, 0, MOST_REPAIR):
            raise OptionError(
                f"repair is {repair!r}, wanted a number of rounds, 0 to {MOST_REPAIR}, or None"
            )
        if max_missing is None:
            share = None if repair is not None else MAX_MISSING
            return cls(share, repair, repair is not None, exact)
        if isinstance(max_missing, str):
            raise OptionError(f"max_missing is {max_missing!r}, wanted a share, 0 to 1, or None")
        Options(max_missing=max_missing)  # refuses what the option refuses
        return cls(max_missing, repair, exact=exact)

    def changes(self, options: Options) -> dict[str, Any]:
        """The options that a call is made with, besides those in force.

        Unless it is ``exact``, a scope or the group may ask for more rounds, and what the group was
        given goes before what nobody asked for.
        """
        changes: dict[str, Any] = {}
        if self.repair is not None:
            changes["repair"] = self.repair if self.exact else max(self.repair, options.repair)
        given = any(options.is_given(name) for name in MEANS)
        if self.max_missing is not None and (self.exact or self.asked or not given):
            changes["max_missing"] = self.max_missing
        if self.whole_packets:
            changes["finer_packets"] = 1
        return changes


NOTHING_ASKED: Final = Recovery()  # recovery by the group's options


FP16: Final = "fp16"
KNOWN: Final = tuple(name for name in codec.ENCODINGS if name != FP16)
"""Not fp16: what it makes infinite could never be made up for."""


@dataclass(frozen=True)
class Wire:
    gradients: str | None = None  # of gradients; None: as the group has it
    parameters: str = "same"  # of parameters

    @classmethod
    def of(cls, wire: str | None) -> Wire:
        """Those that an argument asks for, of gradients and parameters; else OptionError."""
        if wire is None:
            return cls()
        parts = wire.split("/") if isinstance(wire, str) else [""]
        if len(parts) > 2 or not all(part in KNOWN for part in parts):
            known = ", ".join(KNOWN)
            raise OptionError(
                f"wire is {wire!r}, wanted None, or one of {known}, or two of them as int4/int8, "
                f"of gradients and of parameters"
            )
        return cls(parts[0], parts[-1])

    @property
    def asked_of_gradients(self) -> str | None:
        """That of gradients now; a scope that sets ``wire`` goes before an argument."""
        return None if _set_by_scope() is not None else self.gradients

    @property
    def asked_of_parameters(self) -> str:
        """That of parameters now: as they are in a scope that says so, such as ``reliable()``."""
        return "same" if _set_by_scope() == "same" else self.parameters


def _set_by_scope() -> str | None:
    around = scope()
    return dict(around.changes).get("wire") if around is not None else None


NOT_ASKED: Final = Wire()


def as_elements(
    lost: Mask, per_block: int, chunk: int, device: torch.device | None = None
) -> Tensor:
    """The mask (world * chunk,) of elements in lost blocks, (world, blocks) by owner."""
    blocks = torch.from_numpy(lost).to(device=device)
    return blocks.repeat_interleave(per_block, dim=1)[:, :chunk].reshape(-1)


def missed_by_rounding(
    source: Tensor, lost: Mask, sent: Mask, per_block: int, encoding: str
) -> Tensor:
    """The part of a contribution, float32 (world * n,), that was lost or rounded off.

    ``lost`` is bool (world, blocks), by owner; ``sent`` is bool (world,), the owners it went to.
    """
    out = torch.zeros_like(source)
    chunk = len(source) // len(sent)
    mask = as_elements(lost, per_block, chunk, source.device).view(len(sent), chunk)
    rows = zip(source.view(len(sent), chunk), out.view(len(sent), chunk), mask, strict=True)
    for was_sent, (row, missed, gone) in zip(sent, rows, strict=True):
        if was_sent:
            rounded_to(missed, row, encoding, per_block)
            torch.sub(row, missed.masked_fill_(gone, 0), out=missed)
    return out


def rounded_to(out: Tensor, source: Tensor, encoding: str, per_block: int) -> None:
    """Fills float32 (n,) with what a receiver decodes of ``source``, which it may be."""
    held = source.cpu()  # codecs work on host memory; what is there is itself
    room = out if out.is_cpu else held
    rounded(encoding, held.data_ptr(), room.data_ptr(), len(held), per_packet=per_block)
    if room is not out:
        out.copy_(room)

"""Encoding of gradients and parameters (option ``wire``), and what it takes of their elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import scope
from lossycoll.plan import codec
from lossycoll.runtime.engine.codecs import rounded

from .staleness import Mask

FP16: Final = "fp16"
KNOWN: Final = tuple(name for name in codec.ENCODINGS if name != FP16)
"""Not fp16: what it makes infinite could never be made up for."""


@dataclass(frozen=True)
class Wire:
    """The encodings that were asked for."""

    gradients: str | None = None  # of gradients; None: as the group has it
    parameters: str = "same"  # of parameters

    @classmethod
    def of(cls, wire: str | None) -> Wire:
        """The encodings that a method's argument asks for; else OptionError.

        One for both; or two, of gradients and of parameters, as "int4/int8" or "int4/same".
        """
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
        """That of gradients now; None: as the group and the scope have it. A scope around the
        caller that sets ``wire`` goes before a method's own argument."""
        return None if _set_by_scope() is not None else self.gradients

    @property
    def asked_of_parameters(self) -> str:
        """That of parameters now: as they are in a scope that says so, such as ``reliable()``."""
        return "same" if _set_by_scope() == "same" else self.parameters


def _set_by_scope() -> str | None:
    around = scope()
    return dict(around.changes).get("wire") if around is not None else None


NOT_ASKED: Final = Wire()


def exactly(encoding: str, options: Options) -> str:
    """The name of an encoding whose sender works out what a receiver makes of it: rounded to the
    nearest, so that it needs no draws."""
    return codec.named(encoding, options.wire_group, options.wire_spikes)


def as_elements(
    lost: Mask, per_block: int, chunk: int, device: torch.device | None = None
) -> Tensor:
    """The mask (world * chunk,) of elements in lost blocks, (world, blocks) by owner.

    A block has ``per_block`` elements, a chunk's last one maybe fewer.
    """
    blocks = torch.from_numpy(lost).to(device=device)
    return blocks.repeat_interleave(per_block, dim=1)[:, :chunk].reshape(-1)


def missed_by_rounding(
    source: Tensor, lost: Mask, sent: Mask, per_block: int, encoding: str
) -> Tensor:
    """The part of a contribution that was lost, or rounded off by its encoding to the nearest.

    ``source`` and result are float32 (world * n,); ``lost`` is bool (world, blocks), by owner;
    ``sent`` is bool (world,), the owners that it was sent to.
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
    """Fills float32 (n,) with what a receiver decodes of ``source``, by packets of ``per_block``.

    The encoding rounds to the nearest; ``out`` may be ``source``.
    """
    held = source.cpu()  # codecs work on host memory; what is there is itself
    room = out if out.is_cpu else held
    rounded(encoding, held.data_ptr(), room.data_ptr(), len(held), per_packet=per_block)
    if room is not out:
        out.copy_(room)

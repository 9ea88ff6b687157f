"""How a method's gradients and parameters travel: option ``wire``, for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import scope
from lossycoll.plan import codec

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

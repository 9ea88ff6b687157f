"""How a method's gradients and parameters travel: option ``wire``, for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import codec


@dataclass(frozen=True)
class Wire:
    """The encodings that were asked for.

    Attributes:
        gradients: Of gradients; None: as the group has it.
        parameters: Of parameters.
    """

    gradients: str | None = None
    parameters: str = "same"

    @classmethod
    def of(cls, wire: str | None) -> Wire:
        """What the argument of a method means.

        Args:
            wire: An encoding for both; or two, of gradients and of parameters, as "int4/int8" or
                "int4/same". None: nothing is asked for.

        Returns:
            The encodings.

        Raises:
            OptionError: There is no such encoding.
        """
        if wire is None:
            return cls()
        parts = wire.split("/") if isinstance(wire, str) else [""]
        if len(parts) > 2 or not all(part in codec.ENCODINGS for part in parts):
            known = ", ".join(codec.ENCODINGS)
            raise OptionError(
                f"wire is {wire!r}, wanted None, or one of {known}, or two of them as int4/int8, "
                f"of gradients and of parameters"
            )
        return cls(parts[0], parts[-1])


NOT_ASKED: Final = Wire()


def exactly(encoding: str, options: Options) -> str:
    """The name of an encoding whose sender works out what a receiver makes of it: rounded to the
    nearest, so that it needs no draws.

    Args:
        encoding: One of plan.codec's, without parameters.
        options: Those in force, whose parameters it takes.

    Returns:
        A name of plan.codec's.
    """
    return codec.named(encoding, options.wire_group, options.wire_spikes)

"""Schema of an option: its values, how they are read and checked, and what it says of itself."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.plan import faults

from .ranges import is_real, is_whole

PREFIX: Final = "LOSSYCOLL_"


@dataclass(frozen=True)
class Values:
    """The values that an option may have.

    Both functions return the value in its final type, and raise ValueError or TypeError for a bad
    one.
    """

    allowed: str | Callable[[], str]  # in words, or what gives them where they are not fixed
    read: Callable[[str], Any]  # of a variable's text
    check: Callable[[Any], Any]  # of any value

    @property
    def wanted(self) -> str:
        """The allowed values in words, as Markdown."""
        return self.allowed if isinstance(self.allowed, str) else self.allowed()


@dataclass(frozen=True)
class OptionRow:
    """A row of the table of options."""

    values: Values
    meaning: str
    agree: bool  # whether ranks whose values differ are refused when the group is made
    per_call: bool  # whether a scope may set it
    of_host: bool  # whether groups that differ in it have an engine host each


class Default:
    """Marks a value that nobody has written: ``isinstance(value, Default)``.

    The mark is the value's type, since ``dataclasses.replace`` hands on values and nothing else,
    written or not. So it stays in replaced options, copies and pickles.
    """


class _DefaultInt(Default, int):
    pass


class _DefaultFloat(Default, float):
    pass


class _DefaultText(Default, str):
    pass


def _default(value: float | str) -> Default:
    if isinstance(value, str):
        return _DefaultText(value)
    return _DefaultInt(value) if isinstance(value, int) else _DefaultFloat(value)


def option(
    default: float | str,
    values: Values,
    meaning: str,
    *,
    agree: bool = False,
    per_call: bool = False,
    of_host: bool = False,
) -> Any:
    about = OptionRow(values, meaning, agree, per_call, of_host)
    return field(default=_default(default), metadata={"row": about})


def call_option(default: float | str, values: Values, meaning: str) -> Any:
    """A field that scopes may set, and that ranks agree on."""
    return option(default, values, meaning, agree=True, per_call=True)


def row(entry: Field[Any]) -> OptionRow:
    found: OptionRow = entry.metadata["row"]
    return found


def choice(*names: str, besides: Sequence[str] = (), in_words: str = "") -> Values:
    values = growing_choice(lambda: names, always=besides)
    if not besides:
        return values
    return replace(values, allowed=f"{values.wanted} or {in_words}")


def growing_choice(
    names: Callable[[], Sequence[str]], hint: str = "", always: Sequence[str] = ()
) -> Values:
    """One of some names, of which there may be more later."""

    def check(value: Any) -> str:
        if value not in always and value not in names():
            raise ValueError(*([hint] if hint else []))
        return str(value)

    def allowed() -> str:
        return " or ".join(f"`{name}`" for name in names())

    return Values(allowed, str.strip, check)


def integer(low: int, high: int, *, allowed: str | None = None, zero: bool = False) -> Values:
    """A whole number. ``allowed``: the values in words; None: made of the limits."""

    def check(value: Any) -> int:
        # True is a mistake for a number, but not for a switch.
        value = int(value) if high == 1 and isinstance(value, bool) else _plain(value)
        if not (is_whole(value, low, high) or (zero and is_whole(value, 0, 0))):
            raise ValueError
        return int(value)

    if allowed is None:
        top = f"2^{high.bit_length() - 1}" if high > 1 << 32 else str(high)
        allowed = f"{low} to {top}"
    return Values(allowed, lambda text: int(text.strip(), 0), check)


def one_of(*numbers: int) -> Values:
    between = integer(min(numbers), max(numbers), allowed=" or ".join(map(str, numbers)))

    def check(value: Any) -> int:
        found: int = between.check(value)
        if found not in numbers:
            raise ValueError
        return found

    return replace(between, check=check)


def number(low: float, high: float, unit: str) -> Values:

    def check(value: Any) -> float:
        value = _plain(value)
        if not is_real(value, low, high):
            raise ValueError
        return float(value) + 0.0  # -0.0 is 0.0: equal options have equal hashes

    return Values(f"{low:g} to {high:g} {unit}", float, check)


def _plain(value: Any) -> Any:
    """Numbers of other libraries (NumPy's, say) as Python's; anything else as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:
        raise ValueError from None  # larger than any float


def share(least: float, word: str) -> Values:
    """0, a share, or a word."""
    fraction = number(0, 1, "")

    def check(value: Any) -> float | str:
        if value == word:
            return word
        if isinstance(value, str) and value.rstrip().endswith("%"):
            value = faults.fraction(value)
        share: float = fraction.check(value)
        if 0 < share < least:
            raise ValueError
        return share

    def read(text: str) -> float | str:
        return word if text.strip() == word else faults.fraction(text)

    return Values(f"0, {least:g} to 1, or `{word}`", read, check)


def text(allowed: str, check: Callable[[str], str]) -> Values:
    """A text, without blanks around it."""

    def typed(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return check(value.strip())

    return Values(allowed, str, typed)


def matching(allowed: str, pattern: str, hint: str = "") -> Values:
    """A text of printable characters that ``pattern`` describes. ``hint``: said in an error."""

    def check(value: str) -> str:
        if not (value.isprintable() and re.fullmatch(pattern, value)):
            raise ValueError(*([hint] if hint else []))
        return value

    return text(allowed, check)


def variable(name: str) -> str:
    return PREFIX + name.upper()


def read(entry: Field[Any], text: str) -> Any:
    """The value that a variable's text means, not yet checked. Returns the value, or the text
    itself where it means none."""
    try:
        return row(entry).values.read(text)
    except ValueError:
        return text  # refused by the check, which says what is allowed


def check(entry: Field[Any], value: Any, what: str) -> Any:
    """Returns an option's value in its final type, or raises OptionError; ``what`` names it."""
    values = row(entry).values
    try:
        return values.check(value)
    except (ValueError, TypeError) as error:
        reason = f" ({error})" if str(error) else ""
        allowed = values.wanted.replace("`", "")
        raise refused(f"{what} is {_shown(value)}, wanted {allowed}{reason}") from None


def _shown(value: Any) -> str:
    """A value in an error. Python refuses to write very long numbers out."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def unknown(what: str, name: str, known: list[str]) -> OptionError:
    short = {entry.removeprefix(PREFIX).lower(): entry for entry in known}
    wanted = name.removeprefix(PREFIX).lower()
    near = difflib.get_close_matches(wanted, short, n=1, cutoff=0.4)
    hint = f"did you mean {short[near[0]]}?" if near else f"known: {', '.join(known)}"
    return refused(f"unknown {what} {name}; {hint}")


def refused(reason: str) -> OptionError:
    """The error for options that can't be. It names the rank where a launcher has set one: options
    are written before there is a group that would know."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    who = f"rank {rank}/{world}: " if rank and world else ""
    return OptionError(who + reason, reason=reason)

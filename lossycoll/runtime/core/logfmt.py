"""Structured log lines of the logger ``lossycoll``: ``rank=1 world=4 event=end call="..." ...``.

One line per event, in logfmt. The fields are also on the log record (``record.fields``), as data
that JSON has, for handlers that want them. docs/backend.md has the events.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final

from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import Where

log: Final = logging.getLogger("lossycoll")

LINE: Final = "%(asctime)s.%(msecs)03d lossycoll: %(message)s"
"""A line on standard error: local time first, since launchers keep what ranks write without one."""


def show(options: Options) -> None:
    """Shows what the logger says on standard error, unless logging is configured. The level is that
    of the option ``log``; where that isn't given, TORCH_DISTRIBUTED_DEBUG=DETAIL asks for debug."""
    level = options.log
    if not options.is_given("log") and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        level = "debug"
    number = logging.CRITICAL + 1 if level == "off" else logging.getLevelName(level.upper())
    if log.level != number:  # to set it empties a cache of every logger
        log.setLevel(number)
    if level != "off" and not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LINE, "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)


def event(level: int, where: Where, name: str, **fields: Any) -> None:
    """Logs ``name`` and ``fields`` as seen by the rank of ``where``."""
    if log.isEnabledFor(level):
        of = {"group": where.group} if where.group else {}
        table = {"rank": where.rank, "world": where.world, "event": name, **fields, **of}
        log.log(level, "%s", line(table), extra={"fields": plain(table)})


def plain(value: Any) -> Any:
    """A value as JSON has it: exceptions and other objects become their text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, Integral):  # an enum's member, NumPy's
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, 2``: the first eight of them."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def line(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text)

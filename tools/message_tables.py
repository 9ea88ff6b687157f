"""Tables of all control messages in docs/, from their schemas.

``python -m tools.message_tables`` writes them between marks of the pages; a test compares.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from lossycoll.options.ranges import Between
from lossycoll.runtime.control import schema
from lossycoll.runtime.control.schema import Check, Coded, Length, Schema, Version
from lossycoll.runtime.swarm.protocol import SWARM
from lossycoll.runtime.world.messages import GROUP, WORLD
from lossycoll.runtime.world.queries import ANSWER
from lossycoll.train.elastic.agreement import STORE

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
TABLES: Final[dict[str, dict[str, list[Schema[Any]]]]] = {
    "control-messages.md": {
        "messages of the world": [WORLD],
        "messages of a group": [GROUP],
        "answers": [ANSWER],
        "types of fields": [WORLD, GROUP, ANSWER],
    },
    "swarm-messages.md": {"messages of a swarm": [SWARM], "types of a swarm": [SWARM]},
    "rejoin-protocol.md": {"values in the store": [STORE]},
}
_NAMES: Final = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "object",
    list: "list",
}


def _count(number: float) -> str:
    whole = int(number)
    if whole > 1 << 20 and not (whole + 1) & whole:
        return f"2^{whole.bit_length()} - 1"
    if whole > 1 << 20 and not whole & (whole - 1):
        return f"2^{whole.bit_length() - 1}"
    return f"{number:,g}" if number >= 1e9 else f"{whole:,}"


def aliases(cls: type) -> dict[Any, str]:
    """The names that a module has for types of fields, by type."""
    named = vars(schema) | vars(sys.modules[cls.__module__])
    return {hint: name for name, hint in named.items() if get_origin(hint) in (Annotated, tuple)}


def words(hint: Any, names: dict[Any, str]) -> str:
    """A type of fields, as docs say it."""
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    rules = [mark.words for mark in marks if isinstance(mark, Check)]
    if any(isinstance(mark, Coded) for mark in marks):
        return rules[0]
    bounds = next((mark for mark in marks if isinstance(mark, Between | Length)), None)
    span = f"{_count(bounds.least)} to {_count(bounds.most)}" if bounds else ""
    if bounds and bounds.least == bounds.most:
        span = _count(bounds.most)
    of_tuple = get_args(base) if get_origin(base) is tuple else ()
    inner = [names.get(each) or words(each, names) for each in of_tuple if each is not ...]
    if any(isinstance(mark, Version) for mark in marks):
        said = str(marks[0].number)
    elif dataclasses.is_dataclass(base):
        said = f"[{', '.join(field.name for field in dataclasses.fields(base))}]"
    elif base is str:
        said = f"text of {span} characters"
    elif get_origin(base) is tuple and get_args(base)[-1] is ...:
        said = f"list of {span} {inner[0]}"
    elif get_origin(base) is tuple:
        said = f"[{', '.join(inner)}]"
    elif base in (int, float):
        said = f"{_NAMES[base]} from {span}"
    else:
        said = _NAMES[get_origin(base) or base]
    return ", ".join([said, *rules])


def _fields(cls: type) -> list[tuple[str, Any, dict[Any, str]]]:
    hints = get_type_hints(cls, include_extras=True)
    names = aliases(cls)
    return [(field.name, hints[field.name], names) for field in dataclasses.fields(cls)]


def messages(kinds: Schema[Any]) -> list[str]:
    """The table of a schema's kinds."""
    rows = ["| kind | fields | meaning |", "|---|---|---|"]
    for kind, cls in kinds.kinds.items():
        fields = ", ".join(
            f"{name}: {names.get(hint) or words(hint, names)}" for name, hint, names in _fields(cls)
        )
        said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join((cls.__doc__ or "").split()))
        rows.append(f"| `{kind}` | {fields or '-'} | {said.replace('``', '`')} |")
    return rows


def types(schemas: list[Schema[Any]]) -> list[str]:
    """The table of the types that fields of the schemas have."""
    found: dict[str, str] = {}
    ahead = [cls for one in schemas for cls in one.kinds.values()]
    hints = [entry for cls in ahead for entry in _fields(cls)]
    while hints:
        _, hint, names = hints.pop(0)
        base, *_ = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(base):
            hints += _fields(base)  # type: ignore[arg-type]
        hints += [("", each, names) for each in get_args(base) if each is not ...]
        if hint in names:
            found[names[hint]] = words(hint, names)
    return ["| type | JSON |", "|---|---|"] + [f"| {n} | {found[n]} |" for n in sorted(found)]


def written(page: str, text: str) -> str:
    """A page with its tables as the schemas have them."""
    for name, schemas in TABLES[page].items():
        rows = types(schemas) if name.startswith("types") else messages(schemas[0])
        head, mark, rest = text.partition(f"<!-- {name}: begin -->\n")
        _, end, tail = rest.partition(f"<!-- {name}: end -->")
        if not (mark and end):
            raise KeyError(f"docs/{page} has no marks of {name}")
        text = head + mark + "\n".join(rows) + "\n" + end + tail
    return text


if __name__ == "__main__":
    for page in TABLES:
        path = DOCS / page
        path.write_text(written(page, path.read_text(encoding="utf-8")), encoding="utf-8")

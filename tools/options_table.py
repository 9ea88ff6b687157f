"""The table of docs/options.md: ``python -m tools.options_table`` prints it."""

from __future__ import annotations

from dataclasses import fields

from lossycoll.options.fields import Options
from lossycoll.options.schema import row, variable


def table() -> str:
    """The options as a Markdown table."""
    rows = [
        "| Option | Variable | Default | Allowed | Meaning | Equal on all ranks | Per scope |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in fields(Options):
        about = row(entry)
        default = f"`{entry.default!r}`".replace("'", '"')
        marks = ["yes" if mark else "" for mark in (about.agree, about.per_call)]
        cells = [f"`{entry.name}`", f"`{variable(entry.name)}`", default, about.values.wanted]
        rows.append("| " + " | ".join([*cells, about.meaning, *marks]) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

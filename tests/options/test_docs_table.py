"""The table of docs/options.md is the one that is printed, and has every option."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from lossycoll.options.fields import Options
from tools.options_table import table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_the_documented_table_is_the_one_that_is_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tools.options_table"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed == table()
    assert printed in DOCS.read_text(encoding="utf-8")


def test_every_option_has_a_row_a_variable_and_a_default_that_is_allowed() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(fields(Options))
    for entry, row in zip(fields(Options), rows[2:], strict=True):
        assert f"`{entry.name}`" in row
        assert f"`LOSSYCOLL_{entry.name.upper()}`" in row
        assert len(entry.metadata["row"].meaning) > 20
    assert Options() == Options.from_env({})

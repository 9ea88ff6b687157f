"""Pictures: only a missing matplotlib is a reason for none."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from lossycoll.cli.answer import pyplot


def test_a_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    errors = io.StringIO()
    assert pyplot(Console(file=errors)) is None
    assert "matplotlib is missing" in errors.getvalue()

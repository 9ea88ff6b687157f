"""Pictures: only a missing matplotlib is a reason for none."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from lossycoll.cli.plotting import drawn


def test_a_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "lossycoll.cli.demo.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    errors = io.StringIO()
    assert not drawn("lossycoll.cli.demo.plot", Console(file=errors))
    assert "matplotlib is missing" in errors.getvalue()


def test_a_module_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_plot"):
        drawn("lossycoll.cli.no_such_plot", Console(file=io.StringIO()))

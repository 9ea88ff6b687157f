"""Answers: their JSON is JSON, and only a missing matplotlib is a reason for no picture."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys

import pytest
from rich.console import Console

from lossycoll.cli.answer import Answer, give, pyplot


def test_a_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    errors = io.StringIO()
    assert pyplot(Console(file=errors)) is None
    assert "matplotlib is missing" in errors.getvalue()


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"times": [1.5, math.inf, (math.nan, 2)], "of": {"loss": -math.inf}, "name": "x"}
    assert give(Answer(data, ()), argparse.Namespace(json=True)) == 0
    wanted = {"times": [1.5, None, [None, 2]], "of": {"loss": None}, "name": "x"}
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == wanted

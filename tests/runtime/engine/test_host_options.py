"""The table says of options that an engine's host reads that they belong to it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import HOST_OPTIONS

RUNTIME = Path(__file__).resolve().parents[3] / "lossycoll" / "runtime"
READ_AS = {"ports": "port_range", "disabled": "disable"}
"""Options that are read by way of a property."""


def read_in(path: str) -> set[str]:
    """The options that a file reads of something named ``options``."""
    names = {
        READ_AS.get(node.attr, node.attr)
        for node in ast.walk(ast.parse((RUNTIME / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2].endswith("options")
    }
    return names & {entry.name for entry in fields(Options)}


def test_the_options_that_a_host_reads_are_its_own() -> None:
    found = read_in("engine/host.py")
    assert len(found) > 5
    assert found <= set(HOST_OPTIONS)


def test_groups_and_calls_read_no_option_of_a_host() -> None:
    files = ("engine/binding.py", "collectives/operations.py", "collectives/plan_cache.py")
    found = set().union(*map(read_in, files))
    assert len(found) > 5
    assert not found & set(HOST_OPTIONS)

"""What the table says of an option's way to the engine is what the files on that way read."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from lossycoll.options.fields import Options
from lossycoll.options.schema import Enters, row
from lossycoll.runtime.engine.host import HOST_OPTIONS

RUNTIME = Path(__file__).resolve().parents[3] / "lossycoll" / "runtime"
READ_AS = {"ports": "port_range", "disabled": "disable"}
"""Options that are read by way of a property."""
READERS = {
    Enters.GROUP: ["engine/binding.py"],
    Enters.CALL: ["collectives/operations.py"],
    Enters.PLAN: ["collectives/plan_cache.py"],
}
ALSO_READ = {"delivery", "estimator"}
"""A plan depends on them too, and they are of the call."""


def marked(enters: Enters) -> set[str]:
    return {entry.name for entry in fields(Options) if row(entry).enters is enters}


def read_in(path: str) -> set[str]:
    """The options that a file reads of something named ``options``."""
    tree = ast.parse((RUNTIME / path).read_text(encoding="utf-8"))
    names = {
        READ_AS.get(node.attr, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            node.value.attr
            if isinstance(node.value, ast.Attribute)
            else getattr(node.value, "id", "")
        )
        == "options"
    }
    return names & {entry.name for entry in fields(Options)}


@pytest.mark.parametrize("enters", READERS, ids=lambda enters: enters.name)
def test_what_a_file_on_the_way_reads_is_marked_so(enters: Enters) -> None:
    found = set().union(*(read_in(path) for path in READERS[enters]))
    assert len(found) > 1
    assert found - ALSO_READ <= marked(enters)


def test_the_options_of_an_engine_host_are_marked_so() -> None:
    assert set(HOST_OPTIONS) == marked(Enters.HOST)
    assert read_in("engine/host.py") <= marked(Enters.HOST)


def test_what_only_python_decides_is_read_by_none_of_them() -> None:
    found = set().union(*(read_in(path) for paths in READERS.values() for path in paths))
    assert not found & marked(Enters.PYTHON)

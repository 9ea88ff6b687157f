"""The option `algorithm`: what is registered, here or by packages, is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import (
    algorithm_names,
    choose_algorithm,
    default_algorithm,
    register,
    registry,
    unregister,
)
from tools.options_table import table


def test_an_algorithm_that_is_registered_is_an_option() -> None:
    other = register(replace(choose_algorithm("all_reduce", "ring", 4), name="other"))
    assert Options(algorithm="other").algorithm == "other"
    assert Options.from_env({"LOSSYCOLL_ALGORITHM": "other"}).algorithm == "other"
    names = algorithm_names()
    assert " or ".join(f"`{name}`" for name in names) in table()
    assert names[-1] == "other"
    unregister(other)
    with pytest.raises(OptionError) as caught:
        Options(algorithm="other")
    assert f"option algorithm is 'other', wanted {' or '.join(names[:-1])} (" in str(caught.value)
    assert "registered on every rank" in str(caught.value)


def test_the_meaning_of_auto_is_documented() -> None:
    (row,) = [line for line in table().splitlines() if "`algorithm`" in line]
    assert f"For all_reduce that is the {default_algorithm('all_reduce').name} " in row


def test_packages_are_asked_only_for_an_algorithm_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking reads the metadata of all that is installed, on every rank of a job that begins."""
    asked: list[str] = []

    def nothing(group: str) -> list[object]:
        asked.append(group)
        return []

    monkeypatch.setattr(registry, "entry_points", nothing)
    monkeypatch.setattr(registry, "_unloaded", [registry.ENTRY_POINTS])
    assert Options.from_env({}).algorithm == "auto"
    assert asked == []
    assert Options(algorithm="ring").algorithm == "ring"
    assert asked == [registry.ENTRY_POINTS]

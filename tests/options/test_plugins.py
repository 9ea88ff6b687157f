"""Options whose values packages may add to."""

from __future__ import annotations

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import registry


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

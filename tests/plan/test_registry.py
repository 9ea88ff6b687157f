"""The registry of algorithms: what may be registered, and what is found in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lossycoll.plan import (
    Algorithm,
    Plan,
    algorithm_names,
    algorithms,
    choose_algorithm,
    default_algorithm,
    reduce_scatter,
    register,
    registry,
    unregister,
)
from tools.plans_table import table

OTHER = replace(choose_algorithm("all_reduce", "ring", 4), name="other")


@pytest.fixture
def other() -> Iterator[Algorithm]:
    """An algorithm that the package does not have."""
    register(OTHER)
    yield OTHER
    unregister(OTHER)


def test_every_collective_has_one_default() -> None:
    for collective in registry.COLLECTIVES:
        mine = algorithms(collective)
        assert [a for a in mine if a.default] == [default_algorithm(collective)]
        assert choose_algorithm(collective, "auto", 4) is default_algorithm(collective)
        assert {a.collective for a in mine} == {collective}
    assert {a.collective for a in algorithms()} == set(registry.COLLECTIVES)


def test_an_algorithm_that_is_registered_has_a_name(other: Algorithm) -> None:
    assert algorithm_names("all_reduce") == ("auto", "hierarchical", "transpose", "ring", "other")
    assert algorithm_names()[0] == "auto"
    assert set(algorithm_names("all_reduce")) <= set(algorithm_names())


def test_names_are_options_where_there_is_a_choice() -> None:
    before = algorithm_names()
    assert algorithm_names("barrier") == ("auto",)
    chain = register(replace(choose_algorithm("barrier", "tree", 4), name="chain", default=False))
    assert algorithm_names("barrier") == ("auto", "tree", "chain")
    assert set(algorithm_names()) == {*before, "tree", "chain"}
    unregister(chain)


def test_what_a_call_uses() -> None:
    ring = choose_algorithm("all_reduce", "ring", 4)
    assert choose_algorithm("all_reduce", "ring", 2) is ring
    assert choose_algorithm("all_reduce", "ring", 1) is default_algorithm(
        "all_reduce"
    )  # a ring of one has no slots
    assert choose_algorithm("broadcast", "ring", 4) is default_algorithm("broadcast")
    with pytest.raises(ValueError, match=r"algorithm is 'rnig', wanted one of auto, .*pose, r"):
        choose_algorithm("all_reduce", "rnig", 4)
    with pytest.raises(ValueError, match="collective is 'reduce', wanted one of all_reduce, red"):
        choose_algorithm("reduce", "auto", 4)


def without_finish(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    *,
    order: object,
    missing: object,
) -> Plan:
    raise AssertionError("it is not called")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"collective": "reduce"}, "'other' of reduce: wanted a collective of all_reduce, reduce_"),
        ({"name": "Other"}, "'Other' of all_reduce: wanted a name of lower-case letters"),
        ({"name": "auto"}, "'auto' of all_reduce: wanted a name of .* not 'auto' nor 'hier"),
        ({"name": "hierarchical"}, "'hierarchical' of all_reduce: wanted a name of lower-case"),
        ({"name": "ring"}, r"'ring' of all_reduce: lossycoll\.plan\.ring has it already"),
        ({"default": True}, "'other' of all_reduce: transpose is the default already"),
        ({"build": reduce_scatter.reduce_scatter}, "'other' of all_reduce: .*; wanted a builder "),
        ({"build": without_finish}, r"unexpected keyword argument 'finish'; wanted a builder \("),
    ],
)
def test_what_cannot_be_registered(wrong: dict[str, object], text: str) -> None:
    before = algorithms()
    with pytest.raises(ValueError, match=text):
        register(replace(OTHER, **wrong))
    assert algorithms() == before


def test_registering_again(other: Algorithm) -> None:
    before = algorithms()
    assert register(other) is other
    assert algorithms() == before
    with pytest.raises(ValueError, match="has it already, wanted a new name"):
        register(replace(other))
    unregister(other)
    with pytest.raises(ValueError, match="'other' of all_reduce is not registered"):
        unregister(other)
    with pytest.raises(
        ValueError, match="'tree' of barrier is the default, wanted one that is not"
    ):
        unregister(default_algorithm("barrier"))
    register(other)


def test_installed_packages_bring_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be loaded is left out, with a warning that says why."""
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[lossycoll.algorithms]\n"
        "other = tests.plan.test_registry:OTHER\n"
        "broken = tests.plan.test_registry:NOT_THERE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_unloaded", [registry.ENTRY_POINTS])
    with pytest.warns(UserWarning, match=re.escape("'broken' (tests.plan.test_registry:NOT_THER")):
        names = algorithm_names("all_reduce")
    assert names == ("auto", "hierarchical", "transpose", "ring", "other")
    unregister(OTHER)
    assert algorithm_names("all_reduce") == names[:-1]


def test_the_documented_table_is_the_one_that_is_printed() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "builders.md"
    assert table() in page.read_text(encoding="utf-8")

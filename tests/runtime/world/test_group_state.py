"""What a rank says of its group's state: who left, and when it failed; and by which names errors
travel, which are the protocol's."""

from __future__ import annotations

import logging

import pytest

from lossycoll import errors
from lossycoll.errors import LossyError
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.world import group_state as under_test
from lossycoll.runtime.world.group_state import Health


def health() -> Health:
    return Health(
        0, 2, addresses=["a", "b"], liveness=9.0, control=None, on_failure=lambda error: None
    )


@pytest.mark.parametrize(
    ("last", "when"), [(-1, "before its first call was done"), (0, "after call #0")]
)
def test_a_rank_that_left_is_named_with_the_last_call_that_it_made(last: int, when: str) -> None:
    group = health()
    assert group.left(1) is None
    group.on_bye(1, last)
    error = group.left(1)
    assert error is not None
    assert f"rank 1 (b) left the group {when}; did it end early" in str(error)
    assert "#-1" not in str(error)
    assert error.peer == 1


def test_a_rank_that_left_by_an_error_is_named_with_it() -> None:
    group = health()
    group.on_bye(1, 3, "RuntimeError: shapes differ")
    assert str(group.left(1)).endswith(
        "rank 1 (b) left the group after call #3, by RuntimeError: shapes differ"
    )


def test_a_failure_before_the_first_call_has_no_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lossycoll"):
        group = health()
        group.fail(LossyError("early"))
        group = health()
        group.issue(Collective("barrier"))
        group.fail(LossyError("late"))
    early, late = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert "seq" not in early
    assert late["seq"] == 0


TYPES = {
    thing
    for thing in vars(errors).values()
    if isinstance(thing, type) and issubclass(thing, errors.LossyError)
}


def test_each_type_has_a_name_of_its_own() -> None:
    named = [*under_test.KINDS.values()]
    assert len(named) == len({*named}), "a type has two names"
    assert {*named} == TYPES, "a type has no name"
    assert under_test.SHARED < TYPES


def test_names_are_those_of_the_protocol() -> None:
    assert {
        "LinkError",
        "MismatchError",
        "OperationTimeout",
        "PeerLostError",
        "RendezvousError",
    } == {name for name, cls in under_test.KINDS.items() if cls in under_test.SHARED}
    assert under_test.kind_of(errors.EngineError("broken")) == "EngineError"
    assert under_test.kind_of_unmade(errors.OptionError("no such option")) == "RendezvousError"
    assert (
        under_test.kind_of_unmade(errors.InterfaceError("no such interface")) == "RendezvousError"
    )
    assert under_test.kind_of_unmade(errors.LinkError("nothing comes")) == "LinkError"


def test_a_type_without_a_name_travels_as_the_nearest_that_has_one() -> None:
    class Renamed(errors.LinkError):
        pass

    assert under_test.type_for(under_test.kind_of(Renamed("nothing comes"))) is errors.LinkError
    assert under_test.type_for(under_test.kind_of(KeyError("x"))) is errors.AbortedError


@pytest.mark.parametrize("cls", sorted(TYPES, key=lambda cls: cls.__name__))
def test_what_is_not_shared_aborts_the_others(cls: type[errors.LossyError]) -> None:
    wanted = cls if cls in under_test.SHARED else errors.AbortedError
    assert under_test.type_for(under_test.kind_of(cls("why"))) is wanted

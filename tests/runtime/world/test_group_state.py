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


def heard(error: Exception) -> type[LossyError]:
    """The type of the failure at a rank that hears of another one's."""
    group = health()
    group.on_abort(1, str(error), under_test.kind_of(error))
    return type(group.failure)  # type: ignore[arg-type]


def test_names_are_those_of_the_protocol() -> None:
    shared = {"LinkError", "MismatchError", "OperationTimeout", "PeerLostError", "RendezvousError"}
    assert under_test.SHARED.keys() == shared
    assert {*under_test.SHARED.values()} < TYPES
    for one in (errors.OptionError("no such option"), errors.InterfaceError("no such interface")):
        assert under_test.kind_of_unmade(one) == "RendezvousError"
        assert heard(one) is errors.AbortedError
    assert under_test.kind_of_unmade(errors.LinkError("nothing comes")) == "LinkError"


def test_a_type_without_a_name_travels_as_the_nearest_that_has_one() -> None:
    class Renamed(errors.LinkError):
        pass

    assert heard(Renamed("nothing comes")) is errors.LinkError
    assert heard(KeyError("x")) is errors.AbortedError


@pytest.mark.parametrize("cls", sorted(TYPES, key=lambda cls: cls.__name__))
def test_what_is_not_shared_aborts_the_others(cls: type[errors.LossyError]) -> None:
    is_shared = cls in under_test.SHARED.values()
    assert heard(cls("why")) is (cls if is_shared else errors.AbortedError)

"""Errors travel under names that are the protocol's: one for each type, whatever its class's is."""

from __future__ import annotations

import pytest

from lossycoll import errors
from lossycoll.runtime.world import error_kinds as kinds

TYPES = {
    thing
    for thing in vars(errors).values()
    if isinstance(thing, type) and issubclass(thing, errors.LossyError)
}


def test_each_type_has_a_name_of_its_own() -> None:
    named = [*kinds.KINDS.values()]
    assert len(named) == len({*named}), "a type has two names"
    assert {*named} == TYPES, "a type has no name"
    assert kinds.SHARED < TYPES


def test_names_are_those_of_the_protocol() -> None:
    assert {
        "LinkError",
        "MismatchError",
        "OperationTimeout",
        "PeerLostError",
        "RendezvousError",
    } == {name for name, cls in kinds.KINDS.items() if cls in kinds.SHARED}
    assert kinds.kind_of(errors.EngineError("broken")) == "EngineError"
    assert kinds.kind_of_unmade(errors.OptionError("no such option")) == "RendezvousError"
    assert kinds.kind_of_unmade(errors.InterfaceError("no such interface")) == "RendezvousError"
    assert kinds.kind_of_unmade(errors.LinkError("nothing comes")) == "LinkError"


def test_a_type_without_a_name_travels_as_the_nearest_that_has_one() -> None:
    class Renamed(errors.LinkError):
        pass

    assert kinds.type_for(kinds.kind_of(Renamed("nothing comes"))) is errors.LinkError
    assert kinds.type_for(kinds.kind_of(KeyError("x"))) is errors.AbortedError


@pytest.mark.parametrize("cls", sorted(TYPES, key=lambda cls: cls.__name__))
def test_what_is_not_shared_aborts_the_others(cls: type[errors.LossyError]) -> None:
    wanted = cls if cls in kinds.SHARED else errors.AbortedError
    assert kinds.type_for(kinds.kind_of(cls("why"))) is wanted

"""Scopes: what they change, for whom, and what they refuse."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import lossycoll
from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import scope, within


def test_a_lossy_scope_cannot_be_reliable() -> None:
    with pytest.raises(OptionError, match=r"'reliable'.*lossycoll\.reliable\(\)"):
        lossycoll.lossy(delivery="reliable")
    with lossycoll.lossy(delivery="lossy", repair=1):
        found = scope()
    assert found is not None
    assert dict(found.changes)["delivery"] == "lossy"


def test_a_reliable_scope_cannot_be_lossy() -> None:
    with pytest.raises(OptionError, match=r"'lossy'.*lossycoll\.lossy\(\)"):
        lossycoll.reliable(delivery="lossy")


def test_a_reliable_scope_is_exact_unless_it_asks_for_an_encoding() -> None:
    group = Options(wire="bf16")
    with lossycoll.lossy(wire="fp16"):
        assert within(group, scope()).wire == "fp16"
        with lossycoll.reliable():
            assert within(group, scope()).wire == "same"
        with lossycoll.reliable(wire="bf16", delivery="reliable"):
            inner = within(group, scope())
            assert (inner.wire, inner.delivery, scope().lossy_copies) == ("bf16", "reliable", False)
    with lossycoll.lossy(repair=1):
        assert within(group, scope()).wire == "bf16"
        assert not scope().sets("wire")
    refused = pytest.raises(OptionError, match="option wire is 'int7', wanted same or bf16 or fp16")
    with refused, lossycoll.lossy(wire="int7"):
        pass


def test_scopes_change_options_and_nest() -> None:
    base = Options(repair=1)
    assert scope() is None
    with lossycoll.reliable():
        assert within(base, scope()) == Options(repair=1, delivery="reliable", wire="same")
        with lossycoll.lossy(repair=4, on_missing="keep"):
            inner = within(base, scope())
            assert (inner.delivery, inner.repair, inner.on_missing) == ("lossy", 4, "keep")
            assert scope().lossy_copies
            with lossycoll.reliable():
                assert within(base, scope()).repair == 4
                assert within(base, scope()).delivery == "reliable"
                assert not scope().lossy_copies
        assert within(base, scope()).repair == 1
    assert scope() is None
    assert within(base, None) is base


def test_a_scope_adds_its_changes_to_what_was_given() -> None:
    with lossycoll.reliable():
        inside = {"delivery", "wire"}
        assert within(Options(seed=1), scope()).given == {"seed", *inside}
        # Equal values, of which others are given.
        assert within(Options(repair=1, seed=0), scope()).given == {"repair", "seed", *inside}
        assert within(Options(repair=1), scope()).given == {"repair", *inside}


def test_a_scope_is_left_by_an_exception_too() -> None:
    with pytest.raises(KeyError), lossycoll.lossy():
        raise KeyError
    assert scope() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repair": 300}, "option repair is 300, wanted 0 to 255"),
        ({"interface": "eth0"}, "unknown option of a scope interface; "),
        ({"repiar": 1}, r"did you mean repair\?"),
    ],
)
def test_a_scope_refuses_what_is_no_option_of_a_call(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text), lossycoll.lossy(**changes):
        pass
    assert scope() is None


def test_a_scope_holds_in_its_thread_and_task_alone() -> None:
    seen: list[Any] = []

    async def other() -> None:
        seen.append(scope())

    async def task() -> None:
        waiting = asyncio.ensure_future(other())
        with lossycoll.reliable():
            await waiting

    with lossycoll.reliable():
        thread = threading.Thread(target=lambda: seen.append(scope()))
        thread.start()
        thread.join()
    asyncio.run(task())
    assert seen == [None, None]

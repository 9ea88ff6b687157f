"""The store as the rendezvous sees it: sealed values, and what isn't one."""

from __future__ import annotations

import base64

from lossycoll.runtime.keys.aead import SealedValues
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.polled_store import PolledStore
from tests.support.memory_store import MemoryStore

OURS = SealedValues(Secret.of(b"a secret of tests"))
ANOTHERS = SealedValues(Secret.of(b"another secret of tests"))


def test_a_value_is_what_was_set_for_whoever_has_the_secret_alone() -> None:
    store = MemoryStore()
    ours = PolledStore(store, "rank 0/2", OURS)
    digest = ours.set("session", "0123456789abcdef")
    assert ours.get("session") == "0123456789abcdef"
    assert PolledStore(store, "rank 1/2", ANOTHERS).get("session") is None
    assert PolledStore(store, "rank 1/2").get("session") != "0123456789abcdef"
    assert b"0123456789abcdef" not in base64.b64decode(store.data["session"])
    for reader in (PolledStore(store, "x", ANOTHERS), PolledStore(store, "x")):
        assert reader.anothers("session", "0123456789abcdef".__eq__) == digest
    assert ours.anothers("session", "0123456789abcdef".__eq__) is None
    assert ours.anothers("session", "another".__eq__) == digest
    assert ours.anothers("none", "".__eq__) is ours.get("none") is None


def test_a_value_that_does_not_open_is_missing_among_many() -> None:
    store = MemoryStore()
    ours, other = PolledStore(store, "rank 0/2", OURS), PolledStore(store, "rank 1/2", ANOTHERS)
    ours.set("a", "1")
    other.set("b", "2")
    assert ours.get_all(["a"]) == ["1"]
    assert ours.get_all(["a", "b"]) is None
    assert other.get_all(["b"]) == ["2"]
    assert ours.get_all(["a", "none"]) is None


def test_a_value_that_was_moved_does_not_open() -> None:
    store = MemoryStore()
    ours = PolledStore(store, "rank 0/2", OURS)
    ours.set("hello/1", "one")
    store.data["hello/2"] = store.data["hello/1"]
    assert ours.get("hello/1") == "one"
    assert ours.get("hello/2") is None


def test_marks_and_counters_are_for_everybody() -> None:
    store = MemoryStore()
    ours, plain = PolledStore(store, "rank 0/2", OURS), PolledStore(store, "rank 1/2")
    assert not ours.is_marked("differs")
    plain.mark("differs")
    assert ours.is_marked("differs")
    assert [ours.add("claims", 1), plain.add("claims", 1)] == [1, 2]
    store.data["nonsense"] = b"\xff 5"
    assert ours.counts(["claims", "nonsense"]) == [2, 0]
    assert ours.counts([]) == []

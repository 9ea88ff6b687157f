"""The store as the rendezvous sees it: sealed values, and what isn't one."""

from __future__ import annotations

import base64
import random
import socket
import threading
import zlib
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lossycoll.errors import RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.world import polled_store
from lossycoll.runtime.world.polled_store import KEY_BYTES, PolledStore
from tests.support.memory_store import MemoryStore

OURS = Secret.of(b"a secret of tests")
ANOTHERS = Secret.of(b"another secret of tests")


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


class SmallStore(MemoryStore):
    """A store behind a path of small packets: whatever is larger would be lost for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def set(self, key: str, value: str) -> None:
        assert len(key) + len(value) <= FITS
        super().set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.questions += 1
        found = super().multi_get(keys)
        assert sum(KEY_BYTES + len(key) for key in keys) <= FITS
        assert sum(8 + len(value) for value in found) <= FITS
        return found

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        assert sum(KEY_BYTES + len(key) for key in keys) <= FITS
        return super().check(keys)


FITS = 1200 - 60


@pytest.mark.parametrize("secret", [None, OURS], ids=["clear", "sealed"])
def test_long_values_and_many_keys_fit_small_packets(secret: Secret | None) -> None:
    draw = random.Random(5)
    long = "".join(draw.choices("0123456789abcdef", k=20_000))
    store = SmallStore()
    one = PolledStore(store, "rank 0/2", secret)
    other = PolledStore(store, "rank 1/2", secret)
    one.set("s/roster", long)
    assert other.get("s/roster") == long
    assert max(map(len, store.data.values())) <= 1000
    one.set("s/roster", long[::-1])
    assert other.get("s/roster") == long[::-1]
    keys = [f"s/ends/{rank}" for rank in range(300)]
    for rank, key in enumerate(keys):
        assert other.get_all(keys, 100) is None
        one.set(key, f"{rank:0100}")
    store.questions = 0
    assert other.get_all(keys, 100) == [f"{rank:0100}" for rank in range(300)]
    assert store.questions < 110
    one.set(keys[7], long)
    assert (other.get_all(keys, 100) or [])[7] == long


def test_a_value_whose_pieces_are_missing_or_anothers_is_what_stands_there() -> None:
    store = MemoryStore()
    ours = PolledStore(store, "rank 0/2")
    ours.set("roster", "x" * 5000)
    (piece,) = (key for key in store.data if key != "roster")
    mark = store.data["roster"].decode()
    for bad in (b"", b"\xff", b"~" * 40, base64.b85encode(zlib.compress(b"y" * 5000))):
        store.data[piece] = bad
        assert ours.get("roster") == mark
    del store.data[piece]
    assert ours.get("roster") == mark
    for forged in ("0 pieces " + "a" * 16, "9999 pieces " + "a" * 16):
        store.data["roster"] = forged.encode()
        assert ours.get("roster") == forged


class Wall:
    """Hands on what goes between a store and its client, until it ``drops`` it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.drops = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            came = self._listening.accept()[0]
            on = socket.create_connection(("127.0.0.1", self._to))
            for ends in ((came, on), (on, came)):
                threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _hand_on(self, came: socket.socket, on: socket.socket) -> None:
        while data := came.recv(1 << 16):
            if not self.drops:
                on.sendall(data)


def test_a_store_that_gives_no_answer_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polled_store, "ANSWER_SECONDS", 0.5)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wall = Wall(served.port)
    client = TCPStore("127.0.0.1", wall.port, is_master=False, wait_for_workers=False)
    ours = PolledStore(PrefixStore("pg", client), "rank 1/2")
    ours.set("key", "value")
    assert ours.get("key") == "value"
    with pytest.raises(RuntimeError, match="timeout after 1000ms"):
        client.wait(["none"], timedelta(seconds=1))  # torch's own waits aren't shorter
    wall.drops = True
    with pytest.raises(
        RendezvousError, match=f"port {wall.port} gave no answer for 0.5 s.*mtu_pro"
    ):
        ours.get("key")

"""A store that freezes holds nobody who asks it, and what it says too late answers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lossycoll.errors import RendezvousError
from lossycoll.runtime.world import polled_store
from lossycoll.runtime.world.polled_store import PolledStore, StoreConnection, own_connection
from tests.support.store_server import StoreServer
from tests.support.waiting import until

SECONDS = 1.0
LONG = timedelta(minutes=5)
"""Timeout of the store itself, as torch has it by default: no test takes so long."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    monkeypatch.setattr(polled_store, "ANSWER_SECONDS", SECONDS)
    with closing(StoreServer()) as made:
        yield made


def polled(port: int) -> PolledStore:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    return PolledStore(own_connection(PrefixStore("prefix", store)), "slot 0")


def until_frozen(store: PolledStore) -> None:
    """The signal may come after the next answers."""

    def is_frozen() -> bool:
        try:
            store.is_marked("a")
        except RendezvousError:
            return True
        return False

    until(is_frozen)


def test_a_frozen_store_is_an_error_of_whoever_asks(server: StoreServer) -> None:
    """Also where it freezes before a question that waits for its keys; and it goes on when the
    store does, with nothing of the answers that came too late."""
    ours, other = polled(server.port), polled(server.port)
    ours.mark("a", "1")
    ours.add("n", 5)
    assert (other.get("a"), other.counts(["n"])) == ("1", [5])
    server.freeze()
    until_frozen(other)
    with pytest.raises(RendezvousError, match=r"slot 0: the store at port .* gave no answer"):
        ours.counts(["n"])
    for ask in (lambda: ours.get("a"), lambda: ours.add("n", 1), lambda: ours.is_marked("none")):
        with pytest.raises(
            RendezvousError, match=r"gave no answer for 1 s.*its process is stopped"
        ):
            ask()
    server.thaw()
    assert not ours.is_marked("none")
    assert (ours.get("a"), ours.get("none"), ours.counts(["n"])) == ("1", None, [5])
    assert (other.get("a"), other.is_marked("none")) == ("1", False)


def test_a_store_that_has_ended_is_an_error_at_once(server: StoreServer) -> None:
    ours = polled(server.port)
    ours.mark("a", "1")
    server.close()
    for _ in range(3):  # torch's client would take minutes to connect again
        with pytest.raises(RendezvousError, match="slot 0: the store failed in the rendezvous"):
            ours.get("a")


def test_other_stores_are_asked_themselves() -> None:
    store = HashStore()
    assert own_connection(store) is store


def test_the_process_that_serves_a_store_may_ask_it() -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = own_connection(PrefixStore("a", PrefixStore("b", served)))
    assert isinstance(connection, StoreConnection)
    connection.set("key", "value")
    assert served.get("b/a/key") == b"value"
    assert connection.compare_set("key", "value", "other") == b"other"
    assert connection.multi_get(["key"]) == [b"other"]

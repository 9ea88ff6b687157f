"""How ranks find one another: threads over a store in memory, that may be full of stale keys."""

from __future__ import annotations

import base64
import binascii
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lossycoll.errors import InterfaceError, LossyError, OptionError, RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.world import rendezvous
from lossycoll.runtime.world.comparison import compare_options
from lossycoll.runtime.world.rendezvous import Rendezvous
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until

Alive = Callable[[Mapping[str, Any]], bool]
OURS, ANOTHER = Secret.of(b"a secret of tests"), Secret.of(b"another secret of tests")


@pytest.fixture(autouse=True, params=[None, pytest.param(OURS, marks=pytest.mark.long)])
def secret(request: pytest.FixtureRequest) -> Secret | None:
    """What all ranks have; all that is true without a secret is true with one."""
    SECRETS[:] = [request.param]
    found: Secret | None = request.param
    return found


SECRETS: list[Secret | None] = [None]
"""By thread, as far as there are so many; of the others the last one."""


def together(
    store: MemoryStore,
    ranks: list[int],
    size: int,
    run: Callable[[Rendezvous, int], Any],
    *,
    timeout: float = 60.0,
    late: Mapping[int, float] | None = None,
    alive: Alive = lambda hello: False,
) -> list[Any]:
    """What ``run`` returned or raised in each of several threads; ``late``: seconds, by thread."""
    out: list[Any] = [None] * len(ranks)

    def work(i: int) -> None:
        time.sleep((late or {}).get(i, 0.0))
        secret = SECRETS[min(i, len(SECRETS) - 1)]
        rendezvous = Rendezvous(
            store, ranks[i], size, timeout, describe=f"process {i}", alive=alive, secret=secret
        )
        try:
            out[i] = run(rendezvous, ranks[i])
        except Exception as error:
            rendezvous.part(error)
            out[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def meet(rendezvous: Rendezvous, rank: int) -> Any:
    said = rendezvous.meet({"rank": rank})
    doubled = rendezvous.exchange("first", rank * 2)
    return rendezvous.session, said, doubled, rendezvous.exchange("second", "x" * rank)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_meet_and_exchange(size: int) -> None:
    store = MemoryStore()
    found = together(store, list(range(size)), size, meet, late={0: 0.2, size - 1: 0.1})
    assert len({entry[0] for entry in found}) == 1
    for _, said, doubled, texts in found:
        assert said == [{"rank": rank} for rank in range(size)]
        assert doubled == [2 * rank for rank in range(size)]
        assert texts == ["x" * rank for rank in range(size)]


def test_what_is_to_be_done_meanwhile_is_done_until_all_have_come() -> None:
    done = threading.Event()

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            assert done.wait(10), "rank 0 waits and does nothing"
        return rendezvous.exchange("first", rank, done.set)

    assert together(MemoryStore(), [0, 1], 2, run) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("late", [{0: 0.3}, {1: 0.3}, {}])
def test_keys_of_a_job_before_are_not_believed(late: dict[int, float]) -> None:
    store = MemoryStore()
    sessions = set()
    for _ in range(3):  # a restart finds the same store, and rank 0 may come last
        found = together(store, [0, 1, 2], 3, meet, late=late)
        assert all(isinstance(entry, tuple) for entry in found), found
        sessions |= {entry[0] for entry in found}
    assert len(sessions) == 3


def test_keys_of_a_job_that_failed_are_not_believed() -> None:
    store = MemoryStore()

    def fail(rendezvous: Rendezvous, rank: int) -> Any:
        return rendezvous.meet({}, OptionError("bad") if rank == 1 else None)

    assert all(isinstance(e, LossyError) for e in together(store, [0, 1, 2], 3, fail))
    found = together(store, [0, 1, 2], 3, meet, late={0: 0.3})
    assert all(isinstance(entry, tuple) for entry in found), found


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_cannot_take_part_tells_all(culprit: int) -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        error = InterfaceError("no interface here") if rank == culprit else None
        return rendezvous.meet({}, error)

    begin = time.monotonic()
    found = together(MemoryStore(), [0, 1, 2], 3, run, late={2: 0.2})
    assert time.monotonic() - begin < 30
    for rank, error in enumerate(found):
        assert type(error) is (InterfaceError if rank == culprit else RendezvousError)
        assert "no interface here" in str(error)
        if rank != culprit:
            assert f"rank {rank}/3" in str(error)
            assert f"rank {culprit} (process {culprit}) can't take part" in str(error)


def test_a_rank_that_fails_later_tells_all() -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            raise OptionError("no port is free")
        return rendezvous.exchange("links", rank)

    found = together(MemoryStore(), [0, 1, 2], 3, run)
    assert type(found[1]) is OptionError
    for rank in (0, 2):
        assert f"rank {rank}/3: rank 1 can't take part: no port is free" in str(found[rank])


def test_missing_ranks_are_named_by_all_that_wait() -> None:
    found = together(MemoryStore(), [0, 2], 5, meet, timeout=0.6)
    for error in found:
        assert isinstance(error, RendezvousError)
        assert "ranks 1, 3, 4 are missing after 0.6 s" in str(error)
        assert error.peer == 1
    (alone,) = together(MemoryStore(), [1], 2, meet, timeout=0.3)
    assert "rank 1/2: rank 0 is missing after 0.3 s" in str(alone)


def test_a_rank_that_goes_silent_is_named() -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        return None if rank == 2 else rendezvous.exchange("links", rank)

    found = together(MemoryStore(), [0, 1, 2], 3, run, timeout=0.5)
    for error in found[:2]:
        assert "rank 2" in str(error)
        assert "round 'links'" in str(error) or "can't take part" in str(error)


def test_a_late_second_process_of_a_rank_knows_at_once() -> None:
    for rank in (0, 1):
        begin = time.monotonic()
        found = together(MemoryStore(), [0, 1, rank], 2, meet, late={2: 0.5}, alive=bool)
        assert isinstance(found[0], tuple)
        assert isinstance(found[1], tuple)
        assert f"more than one process claims rank {rank}: " in str(found[2])
        assert "process 2" in str(found[2])
        assert time.monotonic() - begin < 30


def test_a_rank_that_makes_its_group_anew_waits_for_rank_0_to_leave_the_old_one() -> None:
    store = MemoryStore()
    first = together(store, [0, 1], 2, meet)
    # Rank 0 may be slower to leave the first, or listen at the same port again.
    second = together(store, [0, 1], 2, meet, late={0: 0.3}, alive=lambda hello: True)
    for found in second:
        assert not isinstance(found, Exception), "an earlier group of its own is no other process"
    assert second[0][0] == second[1][0] != first[0][0]


def test_a_store_that_fails_is_a_typed_error() -> None:
    store = MemoryStore()

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            time.sleep(0.2)
            store.broken = RuntimeError("Connection reset by peer\nframe #0")
        return rendezvous.exchange("links", rank) if rank == 0 else None

    error, _ = together(store, [0, 1], 2, run)
    assert isinstance(error, RendezvousError)
    assert "the store failed in the rendezvous (Connection reset by peer)" in str(error)


def test_options_that_differ_give_one_verdict_everywhere() -> None:
    shared = [{"repair": 0, "seed": 1}, {"repair": 0, "seed": 1}, {"repair": 2, "seed": 1}]
    for rank in range(3):
        with pytest.raises(RendezvousError) as caught:
            compare_options(rank, shared)
        assert f"rank {rank}/3: option repair is 2 on rank 2 but 0 on rank 0" in str(caught.value)
        assert "LOSSYCOLL_REPAIR" in str(caught.value)
        assert caught.value.peer == 2
    compare_options(0, shared[:2])


# ---- sealed ----


def transcript(rendezvous: Rendezvous, rank: int) -> str:
    rendezvous.meet({"rank": rank})
    return rendezvous.transcript


def test_all_ranks_know_the_meeting_by_the_same_name_and_no_other_has_it() -> None:
    SECRETS[:] = [OURS]
    store = MemoryStore()
    meetings = [together(store, [0, 1, 2], 3, transcript) for _ in range(3)]
    assert all(len(set(one)) == 1 for one in meetings)
    assert len({one[0] for one in meetings}) == 3


def test_nothing_that_ranks_say_can_be_read_in_the_store() -> None:
    def say(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({"token": "planted text"})
        return rendezvous.exchange("more", "planted text")

    for secret, shows in ((None, True), (OURS, False)):
        SECRETS[:] = [secret]
        store = MemoryStore()
        assert together(store, [0, 1], 2, say) == [["planted text"] * 2] * 2
        raw = b" ".join(store.data.values())
        decoded = [_decoded(value) for value in store.data.values()]
        for pattern in (b"planted text", b"process 0", b"hello"):
            assert (pattern in raw or any(pattern in one for one in decoded)) is shows, pattern


def _decoded(value: bytes) -> bytes:
    """What a value may be in base64."""
    try:
        return base64.b64decode(value)
    except binascii.Error:
        return b""


class Hostile(MemoryStore):
    """A store whose server changes what it was given: key and number of the change so far."""

    def __init__(self, change: Callable[[str, str, MemoryStore], str]) -> None:
        super().__init__()
        self._change = change

    def set(self, key: str, value: str) -> None:
        super().set(key, self._change(key, value, self))


def test_a_roster_of_before_is_not_believed() -> None:
    """The server answers with an older roster, under the name of the new one."""
    SECRETS[:] = [OURS]
    old: dict[str, str] = {}

    def change(key: str, value: str, store: MemoryStore) -> str:
        what = key.partition("/")[2]
        if what == "roster":
            return old.setdefault(what, value)
        return value

    store = Hostile(change)
    assert all(isinstance(one, str) for one in together(store, [0, 1], 2, transcript))
    found = together(store, [0, 1], 2, transcript, timeout=1.0)
    assert isinstance(found[1], RendezvousError)


def test_what_a_server_invents_is_missing() -> None:
    SECRETS[:] = [OURS]

    def change(key: str, value: str, store: MemoryStore) -> str:
        return json.dumps({"nonce": "0", "who": "x", "hello": {}}) if "hello/1" in key else value

    found = together(Hostile(change), [0, 1], 2, transcript, timeout=1.0)
    for error in found:
        assert isinstance(error, RendezvousError)
        assert "rank 1 is missing" in str(error) or "refused by rank 0" in str(error)


@pytest.mark.parametrize(
    "secrets",
    [(OURS, ANOTHER), (None, OURS), (OURS, None)],
    ids=["another", "rank 0 has none", "rank 1 has none"],
)
def test_ranks_whose_secrets_differ_all_say_so(
    secrets: tuple[Secret | None, Secret | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.2)
    SECRETS[:] = [secrets[0], secrets[0], secrets[1], secrets[0]]
    found = together(MemoryStore(), [0, 1, 2, 3], 4, meet, timeout=30.0)
    for rank, error in enumerate(found):
        assert isinstance(error, RendezvousError)
        assert f"rank {rank}/4: " in str(error)
        assert "the secrets of rank 0 and rank 2 differ" in str(error)
        assert error.peer == (0 if rank == 2 else 2)


def test_a_late_rank_of_another_secret_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.2)
    SECRETS[:] = [OURS, OURS, ANOTHER, ANOTHER]
    found = together(MemoryStore(), [0, 1, 2, 3], 4, meet, timeout=30.0, late={3: 1.0})
    assert ["rank 2 differ" in str(error) for error in found] == [True, True, True, False]
    assert "the secrets of rank 0 and rank 3 differ" in str(found[3])


@pytest.mark.parametrize("place", [1, 2])
def test_a_rank_that_two_processes_claim_is_named_in_sealed_meetings_too(place: int) -> None:
    """The store counts claims in clear."""
    SECRETS[:] = [OURS]
    store = MemoryStore()
    meeting = Rendezvous(store, 0, 3, 3.0, describe="p", alive=lambda hello: False, secret=OURS)
    meeting.session = "0123456789abcdef"
    for rank in (1, 2):
        store.add(f"{meeting.session}/claims/{rank}", 1)
    assert meeting._doubled() is None
    store.add(f"{meeting.session}/claims/{place}", 1)
    assert f"more than one process claims rank {place}" in str(meeting._doubled())


def test_what_strangers_count_up_and_write_costs_no_time() -> None:
    SECRETS[:] = [OURS]
    store = MemoryStore()
    meeting = Rendezvous(store, 0, 2, 3.0, describe="p", alive=lambda hello: False, secret=OURS)
    meeting.session = "0123456789abcdef"
    store.data[f"{meeting.session}/claims/1"] = b"999999999999"
    assert meeting._claimed(1) == []
    store.data[f"{meeting.session}/hello/1"] = b"\xff" * (2 << 20)
    assert meeting._get("hello/1") is None


def test_a_process_of_another_secret_that_comes_first_does_not_keep_the_right_one_out() -> None:
    SECRETS[:] = [OURS, OURS, ANOTHER]
    store = MemoryStore()
    found = together(store, [0, 1, 1], 2, meet, timeout=3.0, late={1: 1.0})
    assert [isinstance(one, tuple) for one in found] == [True, True, False]
    assert any("differs/" in key for key in store.data)


def test_a_session_of_an_older_secret_does_not_end_a_job_whose_rank_0_is_late() -> None:
    SECRETS[:] = [ANOTHER]
    store = MemoryStore()
    together(store, [0, 1], 2, meet)
    SECRETS[:] = [OURS]
    found = together(store, [0, 1], 2, meet, late={0: 0.5})
    assert all(isinstance(one, tuple) for one in found), found


# ---- keys that something else has overwritten ----


class OverwrittenAt(MemoryStore):
    """A store whose session something else overwrites after it was looked at ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def check(self, keys: list[str]) -> bool:
        if keys == ["session"] and keys[0] in self.data:
            self.left -= 1
            if self.left == 0:
                self.data["session"] = b"garbage"
        return super().check(keys)


@pytest.mark.parametrize("times", range(1, 9))
def test_a_session_that_is_overwritten_between_two_looks_is_named_by_all(times: int) -> None:
    store = OverwrittenAt(times)

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        return rendezvous.meet({})

    found = together(store, [0, 1], 2, run, timeout=10.0, late={1: 0.3})
    assert store.left <= 0
    for error in found:
        assert isinstance(error, RendezvousError), found
        assert "the store's key 'session'" in str(error)


@pytest.mark.parametrize("value", ["0123456789abcdef", "garbage", "", "\x00\xff"])
def test_a_session_that_something_else_overwrites_is_named_by_all(value: str) -> None:
    begin = time.monotonic()
    store = MemoryStore()

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        return rendezvous.meet({})

    def overwrite() -> None:
        until(lambda: "session" in store.data, "rank 0 begins")
        store.set("session", value)

    thread = threading.Thread(target=overwrite)
    thread.start()
    found = together(store, [0, 1, 2], 3, run, timeout=60.0, late={1: 0.1, 2: 0.3})
    thread.join()
    assert time.monotonic() - begin < 30, "nobody waits out the timeout"
    for rank, error in enumerate(found):
        assert isinstance(error, RendezvousError), found
        assert f"rank {rank}/3" in str(error)
        assert "the store's key 'session' holds" in str(error)
        assert "something else writes to this job's store" in str(error)
        assert "more than one process" not in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hello/1", "garbage"),
        ("hello/1", "5"),
        ("hello/1", "[]"),
        ("hello/1", '{"nonce": 1}'),
        ("roster", "garbage"),
        ("roster", "[]"),
    ],
)
def test_a_key_of_the_meeting_that_something_else_overwrites_is_named(key: str, value: str) -> None:
    SECRETS[:] = [None]

    def change(name: str, said: str, store: MemoryStore) -> str:
        return value if name.endswith(key) else said

    begin = time.monotonic()
    found = together(Hostile(change), [0, 1], 2, meet, timeout=20.0)
    assert time.monotonic() - begin < 15, "nobody waits out the timeout"
    for error in found:
        assert isinstance(error, RendezvousError), found
        assert "which no rank wrote" in str(error)


def test_a_roster_of_a_job_of_another_size_is_no_overwritten_one() -> None:
    store = MemoryStore()
    together(store, [0, 1, 2], 3, meet)
    found = together(store, [0, 1], 2, meet, late={0: 0.3})
    assert all(isinstance(entry, tuple) for entry in found), found

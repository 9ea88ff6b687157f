"""Whose directory serves: claims, leases by the server's clock, and what others write there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.keys.secret import secret_of
from lossycoll.runtime.swarm.directory import LEASE
from lossycoll.runtime.swarm.directory_tables import KEPT_SECONDS
from lossycoll.runtime.swarm.valkey_server import (
    GRACE_SECONDS,
    Claimed,
    Notice,
    Notices,
    ValkeyServer,
    ValkeyUrl,
)
from tests.support.valkey import Server

SESSION = "5c" * 8


class Swarm:
    """Peers that claim, and the key."""

    def __init__(self, server: Server) -> None:
        self.client: Any = server.client()
        self.server = ValkeyServer(ValkeyUrl.of(server.url("here")))
        self.notices = self.of("a secret of tests")

    def of(self, secret: str | None, prefix: str = "here") -> Notices:
        return Notices(self.server, prefix, secret_of(secret) if secret else None)

    def begin(self) -> Claimed:
        found = self.notices.claim("", True)
        assert found is not None
        assert found.own
        return found

    def age(self, seconds: float) -> None:
        """The notice is as old as that."""
        assert self.client.pexpire(self.notices.key, round(1000 * (KEPT_SECONDS - seconds)))


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    pytest.importorskip("valkey", reason="the package valkey isn't installed")
    server = Server(tmp_path)
    made = Swarm(server)
    yield made
    made.server.close()
    server.close()


def test_a_newcomer_that_may_not_begin_finds_nobody(swarm: Swarm) -> None:
    assert swarm.notices.claim("", False) is None
    assert swarm.client.get(swarm.notices.key) is None
    assert not swarm.begin().begun
    found = swarm.notices.claim("", False)
    assert found is not None
    assert not found.own


def test_one_of_many_that_claim_at_once_has_it(swarm: Swarm) -> None:
    found: list[Claimed | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(swarm.notices.claim("", True)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 16
    assert sum(one is not None and one.own for one in found) == 1
    assert len({one.notice for one in found if one is not None}) == 1


def test_a_directory_that_has_gone_is_replaced_and_its_session_stays(swarm: Swarm) -> None:
    first = swarm.begin()
    listening = swarm.server.listen(swarm.notices.channel(first.notice.inbox))
    swarm.age(LEASE - 2.0)  # it listens, and has renewed its notice within the lease
    found = swarm.notices.claim("", False)
    assert found is not None
    assert found.notice == first.notice
    listening.close()
    second = swarm.notices.claim("", False)  # nobody listens any more
    assert second is not None
    assert (second.own, second.begun) == (True, True)
    assert second.notice.session == first.notice.session
    assert second.notice.inbox != first.notice.inbox
    assert not swarm.notices.renew(first.value, first.value)
    assert swarm.notices.renew(second.value, second.value)


def test_one_that_listens_and_renews_nothing_is_replaced(swarm: Swarm) -> None:
    """It is frozen, say."""
    first = swarm.begin()
    listening = swarm.server.listen(swarm.notices.channel(first.notice.inbox))
    swarm.age(LEASE + 0.5)
    found = swarm.notices.claim("", False)
    assert found is not None
    assert found.own
    listening.close()


def test_one_that_is_about_to_listen_has_some_time(swarm: Swarm) -> None:
    first = swarm.begin()
    for age, own in ((0.0, False), (GRACE_SECONDS + 0.5, True)):
        swarm.age(age)
        found = swarm.notices.claim("", False)
        assert found is not None
        assert found.own is own
        assert (found.notice == first.notice) is not own


def test_a_directory_says_what_session_it_has_taken_over(swarm: Swarm) -> None:
    first = swarm.begin()
    value = swarm.notices.value(Notice(first.notice.inbox, SESSION))
    assert swarm.notices.renew(first.value, value)
    found = swarm.notices.claim("", False)
    assert found is not None
    assert found.notice.session == SESSION


@pytest.mark.parametrize("others", [False, True])
def test_a_directory_that_ends_in_good_order(others: bool, swarm: Swarm) -> None:
    first = swarm.begin()
    listening = swarm.server.listen(swarm.notices.channel(first.notice.inbox))
    swarm.notices.release(b"another's", others=others)
    assert swarm.client.get(swarm.notices.key) == first.value
    swarm.notices.release(first.value, others=others)
    assert (swarm.client.get(swarm.notices.key) is None) is not others
    found = swarm.notices.claim("", True)
    assert found is not None
    assert (found.own, found.begun) == (True, others)
    assert (found.notice.session == first.notice.session) is others
    listening.close()


def test_peers_that_come_back_to_an_empty_server_bring_their_session(swarm: Swarm) -> None:
    found = swarm.notices.claim(SESSION, False)
    assert found is not None
    assert (found.own, found.begun, found.notice.session) == (True, True, SESSION)


def test_a_notice_opens_with_its_secret_under_its_prefix_alone(swarm: Swarm) -> None:
    first = swarm.begin()
    for notices in (swarm.of("another secret of tests"), swarm.of(None)):
        with pytest.raises(OSError, match="another secret, or none"):
            notices.claim("", True)
    elsewhere = swarm.of("a secret of tests", "elsewhere")
    swarm.client.set(elsewhere.key, first.value, ex=60)
    with pytest.raises(OSError, match="another secret, or none"):
        elsewhere.claim("", True)
    swarm.client.set(elsewhere.key, first.value)  # for good: no directory writes so
    found = elsewhere.claim("", True)
    assert found is not None
    assert found.own
    assert elsewhere.counts["forged"] == 2


@pytest.mark.parametrize("kind", ["b", "empty", "long", "list", "inbox alone"])
def test_what_is_no_notice_is_written_over(kind: str, swarm: Swarm) -> None:
    key = swarm.notices.key
    values = {"b": b"\xff\xfe", "empty": b"", "long": b"5" * 3_000_000, "inbox alone": b"5" * 32}
    if kind == "list":
        swarm.client.lpush(key, "a")
    else:
        swarm.client.set(key, values[kind])
    assert swarm.notices.claim("", False) is None  # not by whoever may not begin
    found = swarm.notices.claim("", True)
    assert found is not None
    assert found.own
    assert swarm.client.get(key) == found.value
    assert bool(swarm.notices.counts) == (kind not in ("list", "empty"))


def test_a_directory_writes_over_what_a_stranger_wrote(swarm: Swarm) -> None:
    first = swarm.begin()
    inbox = first.notice.inbox.encode()
    for number, value in enumerate((b"\xff", inbox + b" x", first.value[:-4] + b"AAAA"), 1):
        swarm.client.set(swarm.notices.key, value)
        assert swarm.notices.renew(first.value, first.value)
        assert swarm.client.get(swarm.notices.key) == first.value
        assert swarm.notices.counts["forged"] == number
    swarm.client.delete(swarm.notices.key)
    assert swarm.notices.renew(first.value, first.value)

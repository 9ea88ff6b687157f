"""What the host refuses is waited out, and said once."""

from __future__ import annotations

import errno
import logging

import pytest

from lossycoll.runtime.engine.failures import Where, place_text
from lossycoll.runtime.engine.link_events import LinkEvent, LinkEventKind, LinkLog, sentence
from tests.support.new_network import run_in_a_new_network

WHERE = Where(0, 2, addresses=["10.0.0.1:4711", "10.0.0.2:4711"])


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            LinkEvent(LinkEventKind.REFUSED, errno.EIO, 1, "gso"),
            ["rank 0/2", "fast path gso to rank 1 (10.0.0.2:4711)", "tried again"],
        ),
        (LinkEvent(LinkEventKind.REFUSED, errno.ENOSYS, -1, "mmsg"), ["fast path mmsg (Function"]),
        (LinkEvent(LinkEventKind.LOST, errno.EPERM, 1), ["drops what it sends", "firewall"]),
        (LinkEvent(LinkEventKind.LOST, errno.EMSGSIZE, 1), ["lower LOSSYCOLL_MTU"]),
        (LinkEvent(LinkEventKind.LOST, errno.EPROTO, 1, link=1), ["link 1", "LOSSYCOLL_LINK=udp"]),
        (LinkEvent(LinkEventKind.LOST, errno.EIO, 1, link=1), ["link 1", "see `dmesg`"]),
        (
            LinkEvent(LinkEventKind.FAILING, errno.ENETDOWN, link=1),
            ["no link", "is lost until"],
        ),
        (LinkEvent(LinkEventKind.LOST, errno.ECONNREFUSED, 1), ["ip route get"]),
        (LinkEvent(LinkEventKind.FAILING, errno.ENOMEM), ["nothing can be sent", "timeouts"]),
        (LinkEvent(LinkEventKind.FAILING, errno.EADDRNOTAVAIL), ["the address 10.0.0.1:4711"]),
        (LinkEvent(LinkEventKind.WORKS, errno.ENOMEM, waited=2.5), ["again after 2.5 s"]),
        (LinkEvent(LinkEventKind.FAILING, errno.ENOMEM, link=1), ["rank 0/2, link 1: nothing"]),
    ],
)
def test_a_sentence_says_what_to_do(event: LinkEvent, words: list[str]) -> None:
    text = sentence(event, WHERE)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(("host", "mtu"), [("10.0.0.{}", 1260), ("fd12::{}", 1280)])
def test_the_mtu_that_avoids_pieces_has_room_for_the_familys_headers(host: str, mtu: int) -> None:
    where = Where(0, 2, addresses=[place_text(host.format(rank), 4711) for rank in range(2)])
    text = sentence(LinkEvent(LinkEventKind.SIZE, 0, 1, bytes=1232, wanted=1456), where)
    assert f"LOSSYCOLL_MTU={mtu} " in text


def test_each_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = LinkEvent(LinkEventKind.LOST, errno.EPERM, 1)
    other = LinkEvent(LinkEventKind.LOST, errno.EHOSTUNREACH, 1)
    works = LinkEvent(LinkEventKind.WORKS, errno.ENOMEM)
    elsewhere = LinkEvent(LinkEventKind.LOST, errno.EPERM, 1, link=1)
    events = [one, one, other, None, one, works, elsewhere, None]
    told = LinkLog()
    with caplog.at_level(logging.INFO, logger="lossycoll"):
        told.tell(lambda: events.pop(0), WHERE, lambda what: True)
        told.tell(lambda: events.pop(0), WHERE, lambda what: True)
    assert events == []
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "WARNING", "INFO", "WARNING"], caplog.text


def test_an_address_that_goes_away_is_waited_for() -> None:
    run_in_a_new_network("tests.support.lost_address")


@pytest.mark.parametrize("packets", ["sealed", "clear", "six"])
def test_invented_messages_of_routers_change_nothing(packets: str) -> None:
    run_in_a_new_network("tests.support.forged_icmp", packets)

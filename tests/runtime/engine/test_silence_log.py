"""A link that is dead is said once, with which direction, what was seen and what helps."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lossycoll.runtime.engine.failures import Code, Failure, Where, error_of
from lossycoll.runtime.engine.link_events import Silence, SilenceLog, silence_sentence
from lossycoll.runtime.engine.reports import PeerStats

WHERE = Where(0, 2, addresses=["10.0.0.1:4711", "10.0.0.2:4711"])
WELL = PeerStats(
    rank=1,
    address="10.0.0.2:4711",
    packets_sent=1000,
    packets_received=900,
    packets_missing=100,
    rtt_ns=20_000_000,
    deadline_ns=0,
    delivery_rate=0.9,
)
FROM = replace(WELL, silence=Silence.FROM, silent_ns=30_500_000_000, silent_packets=310)
TO = replace(FROM, silence=Silence.TO)
NO_DATA = replace(FROM, silence=Silence.NO_DATA)
SHARED = ("rank 0/2: ", "rank 1 (10.0.0.2:4711)", "30.5 s", "310 ", "LinkError")


@pytest.mark.parametrize(
    ("peer", "parts"),
    [
        (
            FROM,
            (
                "nothing comes from rank 1",
                "900 packets came",
                "is its process stopped (`lossycoll status`",
                "LOSSYCOLL_PORT_RANGE",
            ),
        ),
        (TO, ("hears nothing of this rank", "LOSSYCOLL_PORT_RANGE")),
        (NO_DATA, ("only control comes from rank 1", "900 packets", "smaller ones are tried")),
    ],
)
def test_a_sentence_says_direction_figures_and_remedy(
    peer: PeerStats, parts: tuple[str, ...]
) -> None:
    text = silence_sentence(peer, WHERE)
    for part in (*SHARED, *parts):
        assert part in text, text


def test_rdma_has_a_remedy_of_its_own() -> None:
    where = replace(WHERE, addresses=["10.0.0.1:4711", "10.0.0.2:4711 (RDMA mlx5_0)"])
    assert "rdma link" in silence_sentence(FROM, where)


def test_each_kind_is_said_once_and_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    told = SilenceLog()

    def tell(peer: PeerStats) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lossycoll"):
            told.tell([peer], WHERE)
        return [record.levelname for record in caplog.records]

    assert tell(WELL) == []
    assert tell(FROM) == ["WARNING"]
    assert tell(replace(FROM, silent_ns=60_000_000_000)) == []
    assert tell(WELL) == ["INFO"]
    assert tell(WELL) == []
    assert tell(FROM) == []
    # While a link heals, what the peer said last is older than its packets.
    assert tell(TO) == []
    assert tell(TO) == ["WARNING"]
    assert tell(WELL) == ["INFO"]
    assert tell(FROM) == tell(TO) == []
    assert tell(WELL) == ["INFO"]


def test_an_error_names_the_direction_that_is_dead() -> None:
    silent = Failure(Code.LINK, peer=1, mine=(0, 0, 20_000_000_000))
    text = str(error_of(silent, WHERE))
    assert "the link from rank 1 (10.0.0.2:4711) to rank 0 (10.0.0.1:4711) is silent" in text
    unheard = replace(silent, theirs=(310, 0, 0))
    text = str(error_of(unheard, WHERE))
    for part in (
        "the link from rank 0 (10.0.0.1:4711) to rank 1 (10.0.0.2:4711) is dead",
        "of 310 packets that were sent over it in 20 s none has arrived",
        "LOSSYCOLL_PORT_RANGE",
        "repair the link",
    ):
        assert part in text, text
    cause = "this host no longer has the address 10.0.0.1 of the interface eth0"
    text = str(error_of(unheard, replace(WHERE, cut_off=cause)))
    assert cause in text
    assert "LOSSYCOLL_PORT_RANGE" not in text

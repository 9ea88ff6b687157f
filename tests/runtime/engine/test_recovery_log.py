"""What is done against loss is said once it changes, and that it doesn't suffice."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lossycoll.plan.sets import Code
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.link_events import PERIOD_SECONDS, RecoveryLog, recovery_sentence
from lossycoll.runtime.engine.reports import PeerStats

WHERE = Where(0, 2, addresses=["10.0.0.1:4711", "10.0.0.2:4711"])
QUIET = PeerStats(
    rank=1,
    address="10.0.0.2:4711",
    packets_sent=1000,
    packets_received=1000,
    packets_missing=0,
    rtt_ns=20_000_000,
    deadline_ns=0,
    delivery_rate=1.0,
    max_missing=0.01,
)
LOSING = replace(
    QUIET,
    link_loss=0.051,
    link_burst=1.2,
    code=Code(128, 10).number,
    expected_missing=0.009,
)
BEYOND = replace(LOSING, code=0, rounds=3, link_loss=0.9, expected_missing=0.656)


def test_a_sentence_says_what_was_chosen_and_why() -> None:
    text = recovery_sentence(LOSING, WHERE)
    for part in (
        "rank 0/2: to rank 1 (10.0.0.2:4711) 5.10% of packets are lost, in runs of 1.2",
        "10 parity packets for 128 (8% more); 0.90% expected missing, 1.00% allowed",
    ):
        assert part in text, text
    assert "can't be kept" not in text
    text = recovery_sentence(BEYOND, WHERE)
    for part in ("no parity, lost packets resent 3 times; 65.60%", "can't be kept: raise max_"):
        assert part in text, text


def test_a_change_is_logged_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    told = RecoveryLog(clock=lambda: now)

    def tell(peer: PeerStats) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lossycoll"):
            told.tell([peer], WHERE)
        return [record.levelname for record in caplog.records]

    assert tell(replace(LOSING, max_missing=-1.0)) == []  # nothing was asked for
    assert tell(QUIET) == []  # and here nothing has to be done
    assert tell(LOSING) == ["INFO"]
    assert tell(replace(LOSING, link_loss=0.052)) == []
    assert tell(BEYOND) == []
    now += PERIOD_SECONDS
    assert tell(BEYOND) == ["WARNING"]
    now += PERIOD_SECONDS
    assert tell(QUIET) == []  # each line doubles the time to the next
    now += PERIOD_SECONDS
    assert tell(BEYOND) == []
    assert tell(QUIET) == ["INFO"]


def test_what_changes_all_day_is_logged_a_few_times_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    told = RecoveryLog(clock=lambda: now)
    for second in range(4 * 3600):
        now = float(second)
        told.tell([LOSING if second % 4 < 2 else BEYOND], WHERE)
    assert 4 <= len(caplog.records) <= 14

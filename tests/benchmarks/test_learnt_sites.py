"""Sites learnt from round trips: what the table says, and that all of it is measured."""

from __future__ import annotations

import pytest

from benchmarks.micro import learnt_sites
from lossycoll.lab import Link, Network
from tests.support.lab_kit import needs_lab


def test_a_row_has_the_slowest_of_all_ranks_that_measure() -> None:
    first = {"named": [0.1, 0.3, 0.2], "learnt": [0.5, 0.6, 0.9], "sites": [[0, 0, 1]] * 3}
    ranks = [{**first, "measuring": [0.1, 0.2, 0.1]}, {**first, "measuring": [0.0, 0.4, 0.3]}]
    ranks[0]["sites"] = [[0, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert learnt_sites.row("here", ranks) == [
        "here",
        "0 0 1, 2 times; one site, 1 times",
        "0.20, 0.30",
        "0.60, 0.90",
        "0.30, 0.40",
    ]


@pytest.mark.long
@needs_lab
def test_groups_of_both_kinds_are_measured() -> None:
    network = Network(sites=2, hosts=2, wan=Link(delay_ms=25))
    for one in learnt_sites.measure(network, 2):
        assert one["sites"] == [[0, 0, 1, 1]] * 2
        assert len(one["named"]) == len(one["learnt"]) == len(one["measuring"]) == 2
        times = zip(one["measuring"], one["learnt"], strict=True)
        assert all(0 < part < whole for part, whole in times)

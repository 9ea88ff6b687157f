"""Who shares a host and a site: what a topology says, and what it refuses."""

from __future__ import annotations

import pytest

from lossycoll.plan.topology import Topology


def test_what_it_says_of_hosts_and_sites() -> None:
    found = Topology.of_labels("aabbbc", "xxxxxy", 44)
    assert found == Topology((0, 0, 1, 1, 1, 2), (0, 0, 0, 0, 0, 1), 44)
    assert (found.world, found.n_hosts, found.n_sites) == (6, 3, 2)
    assert found.members_of_hosts == ((0, 1), (2, 3, 4), (5,))
    assert found.members_of_sites == ((0, 1, 2, 3, 4), (5,))
    assert found.shares_hosts
    assert found.has_sites
    assert not found.is_flat
    assert not found.one_host


def test_equal_ones_have_one_hash() -> None:
    assert hash(Topology.of_labels("abb", "xxx")) == hash(Topology((0, 1, 1), (0, 0, 0)))
    assert len({Topology.flat(3), Topology.of_labels("abc", "xxx")}) == 1


@pytest.mark.parametrize(
    ("hosts", "sites", "flat", "one_host"),
    [
        ("a", "x", True, False),
        ("abc", "xxx", True, False),
        ("abc", "xyz", True, False),
        ("abc", "xxy", False, False),
        ("aab", "xxx", False, False),
        ("aab", "xxy", False, False),
        ("aaa", "xxx", False, True),
    ],
)
def test_which_have_levels(hosts: str, sites: str, flat: bool, one_host: bool) -> None:
    found = Topology.of_labels(hosts, sites)
    assert found.is_flat == flat
    assert found.one_host == one_host
    assert found.has_sites == (sites == "xxy" and hosts == "abc")


def test_that_of_some_ranks_is_numbered_anew() -> None:
    found = Topology.of_labels("aabbcc", "xxxxyy", 2)
    assert found.of_members((1, 4, 5)) == Topology((0, 1, 1), (0, 1, 1), 2)
    assert found.of_members(range(6)) == found
    assert found.of_members((0, 2)) == Topology((0, 1), (0, 0), 2)
    assert found.of_members((0, 2)).is_flat
    assert found.with_sum_packets(5).of_members((1, 4, 5)).sum_packets == 5


@pytest.mark.parametrize(
    ("hosts", "sites", "packets", "message"),
    [
        ((), (), 1, "0 ranks have a host and 0 a site, wanted one of each per rank, and at least"),
        ((0, 1), (0,), 1, "2 ranks have a host and 1 a site"),
        ((1, 0), (0, 0), 1, r"hosts are \(1, 0\), wanted them numbered by first appearance"),
        ((0, 1), (0, 2), 1, r"sites are \(0, 2\), wanted them numbered by first appearance"),
        ((0, 0), (0, 1), 1, "host 0 is of the sites 0 and 1, wanted one site"),
        ((0, 1), (0, 0), 0, "host_packets is 0, wanted 1 or more"),
        ((0, 1), (0, 0), (1, -1), "sum_packets is -1, wanted 0 or more"),
    ],
)
def test_what_is_refused(
    hosts: tuple[int, ...], sites: tuple[int, ...], packets: int | tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(hosts, sites, *(packets if isinstance(packets, tuple) else (packets,)))

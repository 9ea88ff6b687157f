"""What ranks that have met in the store, and can't reach one another, are told."""

from __future__ import annotations

import re

import pytest

from lossycoll.errors import RendezvousError
from lossycoll.runtime.world.comparison import (
    NO_ANSWER,
    Side,
    common_version,
    compare_machines,
    heartbeat_of,
    said_trouble,
    translated,
    unreached,
)

WHO = "rank 1/2"
COORDINATOR = Side(0, "9.9.9.1", 42000, "eth0")
FAR = Side(1, "9.9.9.2", 42001, "eth1", "connection refused")


def test_a_blocked_control_port_is_named_with_both_ends_and_what_to_set() -> None:
    error = unreached(WHO, FAR, COORDINATOR, "0")
    for part in (
        "rank 1/2: rank 1 at 9.9.9.2 (eth1) can't reach rank 0's control port, TCP "
        "9.9.9.1:42000 (eth0): connection refused.",
        "UDP (data)",
        "LOSSYCOLL_PORT_RANGE, which is unset",
        "LOSSYCOLL_INTERFACE",
        "lossycoll doctor --peer 9.9.9.1",
    ):
        assert part in str(error)
    assert error.peer == 0
    assert "NAT" not in str(error), "the address is a public one"
    assert unreached("rank 0/2", FAR, COORDINATOR, "0").peer == 1


def test_both_directions_are_named_where_both_were_tried() -> None:
    coordinator = Side(0, "10.0.0.1", 42000, "eth0", NO_ANSWER)
    text = str(unreached(WHO, Side(1, "fd00::2", 42001), coordinator, "42000-42099"))
    assert "rank 1 at fd00::2 can't reach rank 0's control port, TCP 10.0.0.1:42000" in text
    assert (
        "rank 0 at 10.0.0.1 (eth0) can't reach rank 1's control port, TCP [fd00::2]:42001" in text
    )
    assert "LOSSYCOLL_PORT_RANGE, which is 42000-42099" in text
    assert "NAT" in text, "the address is a private one"


@pytest.mark.parametrize("device", ["docker0", "br-1f2e", "virbr0", "cni0"])
def test_an_address_within_a_host_is_named(device: str) -> None:
    coordinator = Side(0, "172.17.0.1", 42000, device)
    text = str(unreached(WHO, FAR, coordinator, "0"))
    assert f"172.17.0.1 is of {device}, which is within rank 0's host: set LOSSYCOLL_INTERF" in text


def test_a_translated_address_is_named() -> None:
    error = translated("rank 0/2", Side(1, "192.168.0.5", 42001), "198.51.100.7", COORDINATOR)
    for part in ("192.168.0.5:42001", "from 198.51.100.7: a NAT", "LOSSYCOLL_INTERFACE", "VPN"):
        assert part in str(error)
    assert error.peer == 1


@pytest.mark.parametrize(
    ("offered", "version"),
    [
        ([["10.0.0.1"], ["10.0.0.2"]], 4),
        ([["fd00::1", "10.0.0.1"], ["10.0.0.2"]], 4),
        ([["10.0.0.1"], ["fd00::2", "10.0.0.2"]], 4),
        ([["fd00::1", "10.0.0.1"], ["10.0.0.2", "fd00::2"]], 6),
        ([["127.0.0.1"], ["fd00::2"], ["fd00::3", "10.0.0.3"]], 6),
        ([["127.0.0.1", "::1"], ["::1"]], 6),
    ],
)
def test_the_family_that_all_have_is_used(offered: list[list[str]], version: int) -> None:
    assert common_version(WHO, offered) == version


def test_families_that_differ_are_named() -> None:
    with pytest.raises(RendezvousError) as caught:
        common_version(WHO, [["127.0.0.1"], ["fd00::1"], ["fd00::2", "10.0.0.2"], ["10.0.0.3"]])
    assert "rank 1 has IPv6 (fd00::1), rank 3 IPv4 (10.0.0.3)" in str(caught.value)
    assert "LOSSYCOLL_INTERFACE" in str(caught.value)
    assert caught.value.peer == 3


def test_families_that_no_pair_lacks_but_all_together_do_are_named() -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 has IPv4 .* rank 1 IPv6"):
        common_version(WHO, [["10.0.0.1", "fd00::1"], ["fd00::2"], ["10.0.0.3"]])


A, B = ("boot a", 1), ("boot b", 1)


FAMILIES = pytest.mark.parametrize(
    ("one", "other", "loopback"),
    [("10.0.0.1", "10.0.0.2", "127.0.0.1"), ("fd00::1", "fd00::2", "::1")],
)


@FAMILIES
def test_two_machines_of_one_address_are_named(one: str, other: str, loopback: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        compare_machines(WHO, [one, other, one], [A, B, B], ["eth0", "", "e1"])
    assert "rank 0 and rank 2 are on two machines" in str(caught.value)
    assert f"{one} (eth0 and e1)" in str(caught.value)
    assert caught.value.peer == 2
    with pytest.raises(RendezvousError, match=re.escape(loopback)):
        compare_machines(WHO, [loopback] * 2, [A, B], ["lo", "lo"])


@FAMILIES
def test_ranks_of_one_machine_and_of_unknown_ones_may_share_an_address(
    one: str, other: str, loopback: str
) -> None:
    compare_machines(WHO, [one] * 2, [A, A], ["", ""])
    compare_machines(WHO, [one] * 2, [A, None], ["", ""])
    # A rank 0 that knows the master as loopback takes another address when it has met the others.
    compare_machines(WHO, [loopback, loopback, one], [A, B, B], ["", "", ""])


@pytest.mark.parametrize("told", [None, 5, [], "x", {}, {"heartbeat": "7", "trouble": 7}])
def test_what_strangers_write_into_the_store_is_no_sign_of_life(told: object) -> None:
    assert heartbeat_of(told) == 0
    assert said_trouble(told) == ""


def test_what_a_rank_tells_is_bounded_and_printable() -> None:
    assert heartbeat_of({"heartbeat": 3}) == 3
    assert said_trouble({"trouble": "no answer"}) == "no answer"
    assert said_trouble({"trouble": "\x1b[2J"}) == ""
    assert len(said_trouble({"trouble": "x" * 10_000})) == 200

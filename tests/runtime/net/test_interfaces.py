"""This machine's interfaces, and which of them is chosen."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from lossycoll.errors import InterfaceError
from lossycoll.runtime.net import interfaces
from tests.support.new_network import run_in_a_new_network


def test_the_interfaces_of_this_machine() -> None:
    found = {(one.name, one.address): one for one in interfaces.interfaces()}
    lo = found["lo", "127.0.0.1"]
    assert lo.loopback
    assert lo.version == 4
    assert lo.mtu == interfaces.mtu_of("lo") > 1000
    for one in found.values():
        family = socket.AF_INET6 if one.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((one.address, 0))  # it is indeed an address of this machine


def test_the_interface_is_the_one_that_routes_to_the_master() -> None:
    assert interfaces.choose("auto", "127.0.0.1").name == "lo"
    assert interfaces.choose("auto", "localhost").loopback
    for one in interfaces.interfaces():
        if one.version == 4 and not one.loopback:
            assert interfaces.choose("auto", one.address).address == one.address
    assert interfaces.choose("auto", None).mtu > 0


def test_a_kernel_that_tells_no_mtu_of_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator of Linux may not: the interface's counts."""
    unknown = {family: (level, 251) for family, (level, _) in interfaces.MTU_OF_ROUTE.items()}
    monkeypatch.setattr(interfaces, "MTU_OF_ROUTE", unknown)
    for wanted in ("auto", "lo"):
        chosen = interfaces.choose(wanted, "127.0.0.1")
        assert (chosen.name, chosen.mtu) == ("lo", interfaces.mtu_of("lo"))


def test_an_interface_is_chosen_by_name_or_address() -> None:
    assert interfaces.choose("lo", "192.0.2.1").address == "127.0.0.1"
    assert interfaces.choose("127.0.0.1", None).name == "lo"


@pytest.mark.parametrize("wanted", ["nosuch0", "198.51.100.7", "lo:1"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(InterfaceError, match=f"option interface is '{wanted}'") as caught:
        interfaces.choose(wanted, None)
    assert "lo (127.0.0.1)" in str(caught.value)


def test_a_master_without_a_route_is_refused() -> None:
    with pytest.raises(InterfaceError, match=r"'no-such-host\.invalid' is no host that this one"):
        interfaces.choose("auto", "no-such-host.invalid")
    with pytest.raises(InterfaceError, match="nosuch0"):
        interfaces.mtu_of("nosuch0")


def test_an_address_without_a_route_is_no_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_routes", lambda host: {})
    with pytest.raises(InterfaceError, match=r"no route to '192\.0\.2\.9'; check the address"):
        interfaces.choose("auto", "192.0.2.9")


def test_an_address_may_be_spelled_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [interfaces.Interface("e0", address, 1500) for address in ("10.9.0.1", "fd12::1")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: both)
    for wanted in ("fd12::1", "FD12::1", "fd12:0:0:0:0:0:0:1", "fd12::0001"):
        assert interfaces.choose(wanted, None).address == "fd12::1"
    with pytest.raises(InterfaceError, match="fd12::2"):
        interfaces.choose("fd12::2", None)


def test_interfaces_that_are_down_or_oddly_named() -> None:
    run_in_a_new_network("tests.support.odd_interfaces")


def test_a_name_stands_for_the_address_of_the_masters_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [interfaces.Interface("e0", address, 1500) for address in ("10.9.0.1", "fd12::1")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: both)
    for master, wanted in ((["fd12::1"], 6), (["10.9.0.1"], 4), (["fd12::1", "10.9.0.1"], 6)):

        def routes(
            _: str, source: str | None = None, found: Sequence[str] = master
        ) -> dict[str, int]:
            return {one: 1400 for one in found if source in {None, one}}

        monkeypatch.setattr(interfaces, "_routes", routes)
        assert interfaces.choose("e0", "node0").version == wanted
        # The packets of a route may be smaller than those of the address's interface.
        assert (
            interfaces.choose("e0", "node0").mtu == interfaces.choose("auto", "node0").mtu == 1400
        )
        assert {one.version for one in interfaces.candidates("e0", "node0")} == {4, 6}
        # Of a name that has both, what routes is taken, in the resolver's order.
        found = [one.address for one in interfaces.candidates("auto", "node0")]
        assert found == master


@pytest.mark.parametrize(
    ("device", "own", "far", "cause"),
    [
        ("lo", "127.0.0.1", "127.0.0.2", ""),
        ("nosuch0", "127.0.0.1", "127.0.0.2", "no longer has the interface nosuch0"),
        ("lo", "198.51.100.7", "127.0.0.2", "no longer has the address 198.51.100.7 of the"),
        ("lo", "127.0.0.1", "240.0.0.1", "no route from 127.0.0.1 (lo) to 240.0.0.1"),
        ("lo", "::1", "::1", ""),
        ("lo", "2001:db8::7", "::1", "no longer has the address 2001:db8::7 of the"),
    ],
)
def test_why_this_host_cant_send(device: str, own: str, far: str, cause: str) -> None:
    if ":" in own and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    found = interfaces.why_cut_off(device, own, far)
    assert cause in found
    assert bool(cause) == bool(found)

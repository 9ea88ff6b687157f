"""Ports of RDMA from Python, on a libibverbs of the tests' own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from lossycoll.errors import EngineError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.verbs_port import VerbsAddress, VerbsPort
from tests.support import fake_rdma

ADDRESS = VerbsAddress("00" * 10 + "ffff7f000001", 0x123456, 0x7FFFFFFF, 3, 0xFFFF)


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    fake_rdma.drop_library()


def opened(device: str = "fake0", number: int = 1, gid: int = 1) -> VerbsPort:
    return VerbsPort(device, number, gid, library=fake_rdma.library())


def test_an_address_goes_round() -> None:
    assert VerbsAddress.from_json(list(ADDRESS)) == ADDRESS


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([], "not enough values"),
        (["00" * 15, 1, 1, 1, 1], "a GID has 16 bytes, not '0000"),
        (["zz" * 16, 1, 1, 1, 1], "hexadecimal"),
        (["00" * 16, 1 << 24, 1, 1, 1], "no address of a queue pair"),
        (["00" * 16, 1, 1 << 32, 1, 1], "no address of a queue pair"),
        (["00" * 16, 1, 1, -1, 1], "no address of a queue pair"),
        (["00" * 16, 1, 1, 1, 1 << 16], "no address of a queue pair"),
        (["00" * 16, 1, 1, 1], "not enough values"),
        (["00" * 16, "x", 1, 1, 1], "invalid literal"),
    ],
)
def test_what_is_no_address(wrong: list[object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VerbsAddress.from_json(wrong)


def test_two_meet() -> None:
    ports = [opened(), opened()]
    heard: list[set[int]] = [set(), set()]

    def greet(own: int) -> None:
        ports[own].know(own, {1 - own: ports[1 - own].address})
        heard[own] = ports[own].greet(7, own, 4096, 10.0)

    threads = [threading.Thread(target=greet, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [{1}, {0}]
    assert ports[0].mtu == 4096
    assert ports[0].queue == ports[0].queue_wanted
    for port in ports:
        port.close()
        port.close()


def test_nobody_answers() -> None:
    port = opened()
    port.know(0, {3: ADDRESS})
    assert port.greet(7, 0, 1024, 0.05) == set()
    with pytest.raises(EngineError, match="a greeting of 23 bytes can't be"):
        port.greet(7, 0, 23, 0.05)
    port.close()


def test_a_host_takes_it() -> None:
    port = opened()
    host = Host(0, 2, "127.0.0.1", payload_bytes=4032, options=Options())
    host.take_port(port)
    port.close()  # it is the host's now
    assert host.link(1).receive_buffer > 4032
    host.close()


def test_packets_that_are_too_large_for_it() -> None:
    port = opened()
    host = Host(0, 2, "127.0.0.1", payload_bytes=8896, options=Options())
    with pytest.raises(EngineError, match=r"packets have 8944 bytes .* takes 4096 at most"):
        host.take_port(port)
    host.close()
    port.close()


def test_what_cannot_be_opened() -> None:
    with pytest.raises(EngineError, match="mlx5_7:1: libibverbs doesn't know the device") as found:
        opened("mlx5_7")
    assert found.value.errno == errno.ENODEV
    with pytest.raises(EngineError, match="fake0:2: its port has no link"):
        opened(number=2)
    with pytest.raises(EngineError, match="fake0:1: it has no GID 9: see LOSSYCOLL_VERBS_GID"):
        opened(gid=9)
    with pytest.raises(EngineError, match=r"fake0:1: there is no libibverbs: install .* \(No such"):
        VerbsPort("fake0", 1, 1, library="/no/such/library.so")

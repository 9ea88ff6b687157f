"""What the doctor says of RDMA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lossycoll.cli.doctor.checks import Severity, rdma
from lossycoll.runtime.net import rdma_ports
from tests.support import fake_rdma


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    fake_rdma.drop_library()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rdma_ports, "ROOT", tmp_path / "infiniband")
    monkeypatch.setenv("LOSSYCOLL_LIBIBVERBS", fake_rdma.library())
    return tmp_path / "infiniband"


def test_a_machine_without(root: Path) -> None:
    (found,) = rdma()
    assert (found.status, found.found) == (Severity.OK, "no devices; packets go by UDP")


def test_each_port_is_opened(root: Path) -> None:
    fake_rdma.write_port(root, "fake0")
    fake_rdma.write_port(root, "fake1", state="1: DOWN")
    good, down = rdma()
    assert (good.name, good.status) == ("RDMA fake0:1", Severity.OK)
    assert "GID 1 (127.0.0.1, RoCE v2); datagrams of 4096 bytes, 4096 may wait" in good.found
    assert (down.status, down.found) == (Severity.OK, "Ethernet, DOWN: it is not used")


def test_what_is_missing_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_rdma.write_port(root, "fake0", gids={0: ("fe80::1", "IB/RoCE v1", "lo")})
    fake_rdma.write_port(root, "mlx5_0")
    no_gid, unknown = rdma()
    assert no_gid.status == Severity.WARN
    assert "give its interface an IP address" in no_gid.advice
    assert unknown.status == Severity.WARN
    assert "libibverbs doesn't know the device: install its provider" in unknown.advice
    monkeypatch.setenv("LOSSYCOLL_LIBIBVERBS", "/no/such/library.so")
    assert "there is no libibverbs: install libibverbs1" in list(rdma())[1].advice
    monkeypatch.setenv("LOSSYCOLL_MTU", "x")  # which has a line of its own
    assert len(list(rdma())) == 2

"""Ports of RDMA as sysfs shows them, and which one is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from lossycoll.errors import InterfaceError
from lossycoll.runtime.net.interfaces import Interface
from lossycoll.runtime.net.rdma_ports import ChosenPort, choose_port, ports
from tests.support.fake_rdma import write_port

ETH0 = Interface("eth0", "10.0.0.7", 1500)
ETH1 = Interface("eth1", "10.1.0.7", 9000)
V1, V2 = "IB/RoCE v1", "RoCE v2"
ROCE = {
    0: ("fe80::7", V1, "eth0"),
    1: ("fe80::7", V2, "eth0"),
    2: ("::ffff:10.0.0.7", V1, "eth0"),
    3: ("::ffff:10.0.0.7", V2, "eth0"),
    4: ("::", "", ""),
}
SECOND = {0: ("fe80::8", V2, "eth1"), 3: ("::ffff:10.1.0.7", V2, "eth1")}
IB = {0: ("fe80::2:c903:3f:1", "IB", ""), 1: ("fd00::1", "IB", "")}


def chosen(root: Path, interface: Interface, wanted: str = "", gid: int = -1) -> str:
    found, why = choose_port(wanted, gid, interface, ports(root))
    return f"none: {why}" if found is None else f"{found.port} {found.gid.index}"


def test_what_sysfs_shows(tmp_path: Path) -> None:
    assert ports(tmp_path / "nothing") == []
    write_port(tmp_path, "mlx5_1", gids=SECOND, state="1: DOWN")
    write_port(tmp_path, "mlx5_0", gids=ROCE)
    write_port(tmp_path, "mlx5_0", 2, layer="InfiniBand", gids=IB)
    (tmp_path / "mlx5_2").mkdir()  # a driver that has shown no port yet
    first, second, third = ports(tmp_path)
    assert [str(first), str(second), str(third)] == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
    assert (first.state, third.state) == ("ACTIVE", "DOWN")
    assert [str(gid) for gid in first.gids] == [
        "0 (fe80::7, IB/RoCE v1)",
        "1 (fe80::7, RoCE v2)",
        "2 (10.0.0.7, IB/RoCE v1)",
        "3 (10.0.0.7, RoCE v2)",
    ]
    assert [gid.kind for gid in second.gids] == ["InfiniBand", "InfiniBand"]
    assert first.counters == str(tmp_path / "mlx5_0/ports/1/hw_counters")
    (tmp_path / "mlx5_0/ports/1/hw_counters").rmdir()
    assert ports(tmp_path)[0].counters == ""
    assert str(ChosenPort(first, first.gids[3])) == "mlx5_0:1, GID 3 (10.0.0.7, RoCE v2)"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = write_port(tmp_path, "mlx5_0", gids=ROCE)
    (folder / "gids" / "3").write_text("no address\n")
    (folder / "gid_attrs" / "types" / "1").unlink()  # as the kernel says EINVAL of empty entries
    (folder / "gids" / "x").write_text("fe80::9\n")
    (port,) = ports(tmp_path)
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, V1), (1, ""), (2, V1)]


def test_the_interfaces_own_port(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", gids=ROCE)
    write_port(tmp_path, "mlx5_1", gids=SECOND)
    assert chosen(tmp_path, ETH0) == "mlx5_0:1 3"
    assert chosen(tmp_path, ETH1) == "mlx5_1:1 3"
    for other in (Interface("eth2", "10.2.0.7", 1500), Interface("eth0", "10.0.0.8", 1500)):
        said = chosen(tmp_path, other)
        assert said.startswith(f"none: no GID of RoCE v2 with the address of {other}: mlx5_0:1 has")
        assert "name a port by LOSSYCOLL_VERBS_DEVICE" in said


def test_infiniband_where_there_is_one(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", gids=SECOND)
    write_port(tmp_path, "mlx5_1", layer="InfiniBand", gids=IB)
    write_port(tmp_path, "mlx5_2", layer="InfiniBand", gids=IB, state="2: INIT")
    assert chosen(tmp_path, ETH0) == "mlx5_1:1 0"
    assert chosen(tmp_path, ETH1) == "mlx5_0:1 3"  # that of the interface comes first


def test_what_is_asked_for(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", gids=ROCE)
    write_port(tmp_path, "mlx5_1", gids=SECOND)
    write_port(tmp_path, "mlx5_1", 2, layer="InfiniBand", gids=IB)
    assert chosen(tmp_path, ETH0, "mlx5_1") == "mlx5_1:2 0"
    assert chosen(tmp_path, ETH0, "mlx5_1:1") == "mlx5_1:1 3"  # IPv4 before others
    assert chosen(tmp_path, ETH0, "mlx5_1:2", gid=1) == "mlx5_1:2 1"
    assert chosen(tmp_path, ETH0, "mlx5_0", gid=1) == "mlx5_0:1 1"
    assert chosen(tmp_path, ETH1, gid=3) == "mlx5_1:1 3"  # of the interface's own port


def test_what_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(InterfaceError, match="there are: none; is the device's driver loaded"):
        chosen(tmp_path, ETH0, "mlx5_0")
    write_port(tmp_path, "mlx5_0", gids=ROCE)
    write_port(tmp_path, "mlx5_1", gids=SECOND, state="1: DOWN")
    write_port(tmp_path, "mlx5_2", gids={0: ("fe80::9", V1, "eth0")})
    with pytest.raises(InterfaceError, match="there are: mlx5_0:1, mlx5_1:1, mlx5_2:1"):
        chosen(tmp_path, ETH0, "mlx5_3")
    with pytest.raises(InterfaceError, match=r"no port has a link: mlx5_1:1 is DOWN \(Ethernet\)"):
        chosen(tmp_path, ETH0, "mlx5_1")
    with pytest.raises(InterfaceError, match="has no GID of RoCE v2 with the address"):
        chosen(tmp_path, ETH0, "mlx5_2")
    with pytest.raises(InterfaceError, match=r"isn't of RoCE v2; those that are: 1 .*, 3 \(10"):
        chosen(tmp_path, ETH0, "mlx5_0", gid=2)
    for wanted in ("mlx5_0", ""):
        with pytest.raises(InterfaceError, match="no such GID: mlx5_0:1 has 0 "):
            chosen(tmp_path, ETH0, wanted, gid=9)


def test_why_there_is_none(tmp_path: Path) -> None:
    assert chosen(tmp_path / "nothing", ETH0) == "none: "
    write_port(tmp_path, "mlx5_1", gids=SECOND, state="1: DOWN")
    write_port(tmp_path, "efa_0", layer="Unknown", gids=IB)
    said = "no port has a link: efa_0:1 is ACTIVE (Unknown), mlx5_1:1 is DOWN (Ethernet)"
    assert chosen(tmp_path, ETH0).startswith(f"none: {said}; see")
    with pytest.raises(InterfaceError, match="option verbs_gid is 3, and no port has a link"):
        chosen(tmp_path, ETH0, gid=3)

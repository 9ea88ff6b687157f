"""tools/netem: what it would do, what it refuses, and that it leaves nothing half done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import pytest

from lossycoll.errors import LabError
from lossycoll.lab import Lab, Link
from tests.support.lab_kit import ROOT, needs_lab
from tools import netem


class Machine:
    """Answers as ip and tc would, and notes what it was asked to change."""

    def __init__(self, queue: str = "0:", broken: str = "") -> None:
        self.queue, self.broken, self.changes = queue, broken, []

    def __call__(self, command: Sequence[str]) -> str:
        line = " ".join(command)
        if line == "ip -json addr show":
            return json.dumps([{"ifname": name, "mtu": 1500} for name in ("lo", "eth0", "eth1")])
        if line == "ip -json route show default":
            return json.dumps([{"dst": "default", "dev": "eth0"}])
        if line.startswith("ip -json route get"):
            return json.dumps([{"dst": command[-1], "dev": "eth1"}])
        if line.startswith("tc -json qdisc show"):
            return json.dumps([{"kind": "tbf", "handle": self.queue, "root": True}])
        if self.broken and self.broken in line:
            raise LabError("no netem here")
        self.changes.append(line)
        self.queue = netem.HANDLE if "root handle" in line else self.queue
        return ""


LINK = Link(loss=0.01, burst=4, delay_ms=10, rate_mbit=100)


def test_without_yes_nothing_is_touched(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    netem.apply("eth0", LINK, act=False, run=machine)
    out, err = capsys.readouterr()
    assert machine.changes == []
    assert out.splitlines() == [
        "tc qdisc add dev eth0 root handle 1055: tbf rate 100gbit burst 3028 limit 1gb",
        "tc qdisc add dev eth0 parent 1055:1 handle 1056: netem limit 289 delay 10ms "
        "loss gemodel 0.2525253% 25% rate 100000000bit",
    ]
    assert "careful: eth0 may be your way in: the default route goes through it" in err
    assert "--yes does it" in err


def test_the_way_in_is_where_ssh_comes_from() -> None:
    found = netem.login({"SSH_CONNECTION": "198.51.100.7 5000 192.0.2.1 22"}, Machine())
    assert found["eth1"] == "you are logged in through it, from 198.51.100.7"
    assert set(netem.login({"SSH_CONNECTION": "rubbish"}, Machine())) == {"eth0"}


def test_what_is_there_is_kept_replaced_or_taken_away() -> None:
    machine = Machine(queue="8001:")
    with pytest.raises(LabError, match="a queue of somebody else's: tbf 8001:"):
        netem.apply("eth0", LINK, act=True, run=machine)
    netem.clear("eth0", act=True, run=machine)
    assert machine.changes == []
    ours = Machine(queue=netem.HANDLE)
    netem.apply("eth0", LINK, act=True, run=ours)
    assert ours.changes[0] == "tc qdisc del dev eth0 root"
    assert len(ours.changes) == 3
    half = Machine(broken="netem")
    with pytest.raises(LabError, match="no netem here"):
        netem.apply("eth0", LINK, act=True, run=half)
    assert [line.split()[2] for line in half.changes] == ["add", "del"]
    with pytest.raises(LabError, match="no interface eth7; there are lo, eth0, eth1"):
        netem.apply("eth7", LINK, act=True, run=half)


@needs_lab
def test_on_an_interface() -> None:
    """On a host of the laboratory: with a kernel that has netem it loses, without it says so."""
    tool = f"{sys.executable} -m tools.netem"
    script = (
        f"{tool} apply eth0 --loss 1 --yes; echo status $?; tc qdisc show dev eth0; "
        f"{tool} clear eth0 --yes; tc qdisc show dev eth0"
    )
    with Lab() as lab:
        (one,) = lab.run(["sh", "-c", script], {"PYTHONPATH": str(ROOT)}, ranks=1)
    lines = one.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("status"))
    assert not any(netem.HANDLE in line for line in lines[-1:])
    if lines[at] == "status 0":
        assert any("netem" in line and "loss 100%" in line for line in lines[at:])
    else:
        assert "this kernel lacks it" in one.output
        assert not any(netem.HANDLE in line for line in lines[at:])


def test_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert netem.main(["apply", "lo", "--loss", "2"]) == 2
    assert "loss is 2.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        netem.main(["apply", "lo"])
    assert "nothing to apply" in capsys.readouterr().err
    if os.geteuid() == 0:
        assert netem.main(["show", "nosuch0"]) == 1
        assert "no interface nosuch0" in capsys.readouterr().err

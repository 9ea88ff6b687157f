"""The check of netem in a guest, without a guest: what would run there, and how it is judged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lossycoll.lab import Link, Network, Port
from lossycoll.lab.netem import link_arguments
from tools import netem_check, netem_guest
from tools.netem_check import CASES, Recorder, results, script


def batch(lines: list[str], namespace: str, line: str) -> bool:
    """Whether a batch of tc in a namespace has a line."""
    begin = f"ip netns exec {namespace} tc -batch - <<'END'\n"
    batches = "\n".join(lines).split(begin)[1:]
    return any(line in one.partition("\nEND")[0].split("\n") for one in batches)


def test_what_runs_is_what_the_backend_runs() -> None:
    lines = script("/usr/bin/python3").splitlines()
    done = subprocess.run(["sh", "-n"], input="\n".join(lines), text=True, check=False)
    assert done.returncode == 0
    for case in CASES:
        for here, there in ((0, 1), (1, 0)):
            number = f"1{there}"
            arguments = link_arguments(case.network.link_of(there, here), case.network.mtu)
            where = f"dev links parent 1:{number} handle {number}: netem {' '.join(arguments)}"
            assert batch(lines, f"n{here}", f"qdisc replace {where}")
    for action in ("apply", "show", "clear"):
        assert any(f"/usr/bin/python3 -m tools.netem {action} eth0" in line for line in lines)


def test_the_namespace_of_the_middle_has_its_name() -> None:
    backend = Recorder(CASES[0].network)
    moved = [line for one in backend.lines for line in one.splitlines() if " netns n2" in line]
    assert moved == ["link set h0 netns n2", "link set h1 netns n2"]
    assert not any("netns 1" in line for line in backend.lines)


def test_sites_have_gateways() -> None:
    gateway = Port(up_mbit=100, down_mbit=50, queue_ms=12)
    lines = Recorder(Network(sites=2, hosts=1, wan=Link(delay_ms=7), gateway=gateway)).lines
    for site in (0, 1):
        for end, packets, rate in (("s", 99, 100), ("w", 50, 50)):
            shaped = f"qdisc replace dev {end}{site} root handle 1: netem"
            assert batch(lines, "n2", f"{shaped} limit {packets} rate {rate}mbit")
        link = f"qdisc replace dev links parent 1:1{1 - site} handle 1{1 - site}: netem"
        assert batch(lines, f"n{site}", f"{link} limit 1000000 delay 7ms rate 0bit")
    text = "\n".join(lines)
    # Each bridge knows both hosts: one at a port of its own, one behind a cable.
    first, other = "02:6c:61:62:00:01", "02:6c:61:62:00:02"
    ways = [line for line in text.splitlines() if line.startswith("fdb add")]
    assert ways == [
        f"fdb add {address} dev {port} master static"
        for address, ports in ((first, ("h0", "w0", "s1")), (other, ("h1", "w1", "s0")))
        for port in ports
    ]
    assert "link set s0 mtu 1500 master br0 up" in text
    assert "link set w0 mtu 1500 master wan up" in text


def test_what_a_guest_lacks_is_said_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of programs that run in the guest, too: it has this machine's."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netem_guest, "which", lambda name: name != "ethtool")
    monkeypatch.setattr(netem_guest, "run", None)
    assert netem_check.main([]) == 2
    assert "it needs ethtool: apt-get install ethtool" in capsys.readouterr().out
    assert netem_guest.lacking() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netem_guest.lacking() == "it needs root"


def flow(lost: int, bursts: int, seconds: float = 2.0) -> str:
    received = netem_check.PACKETS - lost
    counts = {"sent": netem_check.PACKETS, "received": received, "lost": lost, "bursts": bursts}
    rest = {"doubled": 0, "late": 0, "overflowed": 0, "seconds": seconds}
    return json.dumps({**counts, **rest, "bytes": 1472 * received})


def as_asked() -> dict[str, str]:
    """The guest's files, of a kernel that does what it is asked."""
    losses = [(0, 0), (250, 225), (125, 119), (125, 31), (1200, 600)]
    found: dict[str, str] = {}
    drops = 0
    for number, (case, (lost, bursts)) in enumerate(zip(CASES, losses, strict=True)):
        found[f"ping.{number}"] = json.dumps({"ms": [case.round_trip_ms + 1.0] * 5})
        for name in ("plain", "aggregated"):
            seconds = 2.5 if case.down_mbit else 2.0
            found[f"{name}.{number}"] = flow(lost, bursts, seconds)
            drops += lost
            queues: list[dict[str, Any]] = [{"handle": "1:", "drops": 1}]
            queues.append({"handle": "10:", "drops": drops})
            found[f"{name}-links.{number}"] = json.dumps(queues)
    found["cleared.1"] = "qdisc noqueue 0: dev eth0 root refcnt 2\n"
    return found


def complaints(**changed: str) -> list[str]:
    files = as_asked() | {name.replace("_", "."): text for name, text in changed.items()}
    return [text for result in results(files) for text in result.complaints]


def test_what_is_as_asked_is_not_complained_of() -> None:
    assert complaints() == []
    text = netem_check.table(results(as_asked()))
    assert len(text.splitlines()) == 1 + 2 * len(CASES)
    assert "bursts of 4" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plain_0": flow(1, 1)}, "no loss: plain: lost 0.0400%, wanted 0.0000%"),
        ({"plain_2": flow(250, 240)}, "single losses: plain: lost 10.0000%"),
        ({"aggregated_2": flow(140, 130)}, "140 didn't arrive, netem counts 125 as dropped"),
        ({"plain_3": flow(125, 5)}, "bursts of 4: plain: mean burst 25.00, wanted 1.00 to"),
        ({"plain_3": flow(125, 125)}, "bursts of 4: plain: mean burst 1.00, wanted 2."),
        ({"ping_1": '{"ms": [20.0]}'}, "tools/netem at the sender: a round trip took 20.00 ms"),
        ({"ping_1": '{"ms": []}'}, "tools/netem at the sender: no ping came back"),
        ({"cleared_1": "qdisc tbf 1055: root"}, "tools/netem clear left something"),
        ({"plain_4": flow(0, 0)}, "10 Mbit/s: plain: 14.7 Mbit/s and 0 lost"),
    ],
)
def test_what_is_not_as_asked_is(changed: dict[str, str], said: str) -> None:
    found = complaints(**changed)
    assert len(found) == 1
    assert said in found[0]


def test_the_probe_counts(tmp_path: Path) -> None:
    """On loopback, which loses nothing."""
    probe = tmp_path / "probe"
    netem_check.build_probe(probe)

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(probe), *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    for segments in ("1", "40"):
        flow = run("flow", "-", "-", "127.0.0.1", "500", "1000", segments, "2e6", "500")
        assert (flow["sent"], flow["received"], flow["bytes"]) == (500, 500, 500_000)
    times = run("ping", "-", "-", "127.0.0.1", "5")["ms"]
    assert len(times) == 5
    assert min(times) > 0
    lacking = [str(probe), "ping", "no-such-namespace", "-", "127.0.0.1", "1"]
    assert subprocess.run(lacking, capture_output=True, timeout=60, check=False).returncode == 1

"""The command `lossycoll lab`: its help, and what it refuses."""

from __future__ import annotations

import argparse

import pytest

from lossycoll.cli import lab as lab_args
from lossycoll.cli import main as cli
from lossycoll.lab import Link, Network, Port
from lossycoll.lab.report import DEFAULT_QUEUE
from lossycoll.lab.tcp import Flows


def test_the_help_says_that_a_link_is_one_direction(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lab", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1-0 is the way back" in said
    # What nobody asks for, and the network has.
    assert f"({DEFAULT_QUEUE})" in said


def read(line: str) -> argparse.Namespace:
    return cli.parser().parse_args(["lab", *line.split()])


def test_numbers_may_have_units() -> None:
    given = read("--loss 1% --duplicate 5% --delay-ms 20ms --up-mbit 1g --down-mbit 500k")
    plain = read("--loss 0.01 --duplicate 0.05 --delay-ms 20 --up-mbit 1000 --down-mbit 0.5")
    assert lab_args.network_of(given) == lab_args.network_of(plain)
    assert lab_args.network_of(given).link.loss == 0.01
    assert lab_args.network_of(read("--loss 100%")).link.loss == 1


def test_changes_are_put_in_order_and_add_up() -> None:
    network = Network(sites=2, port=Port(up_mbit=100, queue_ms=5), link=Link(delay_ms=1))
    texts = [
        "8:loss=1%",
        "5:rate=10",
        "5:policer=20",
        "6.5:0-1:delay=50ms",
        "7:2:up=1",
        "9:wan:loss=3%",
    ]
    steps = lab_args.steps_of(texts, network)
    assert [(seconds, text) for seconds, text, _ in steps] == [
        *((5, "rate=10"), (5, "policer=20"), (6.5, "0-1:delay=50ms"), (7, "2:up=1")),
        *((8, "loss=1%"), (9, "wan:loss=3%")),
    ]
    slow, policed, far, one, lossy, wide = (after for *_, after in steps)
    assert slow.port == Port(up_mbit=10, down_mbit=10, queue_ms=5)
    assert policed.port == Port(up_mbit=10, down_mbit=10, policer_ms=20)
    assert (far.link_of(0, 1).delay_ms, far.link_of(1, 0).delay_ms) == (50, 1)
    assert [one.port_of(host).up_mbit for host in range(4)] == [10, 10, 1, 10]
    assert [lossy.link_of(0, 1).loss, lossy.link_of(1, 2).loss] == [0.01, 0]
    assert wide.link_of(1, 2).loss == 0.03
    assert lab_args.steps_of([], network) == []


def test_flows_of_tcp_are_read() -> None:
    given = [lab_args.tcp_flows(text) for text in ("cubic", "bbr:3@20%", "reno:2:1-0")]
    assert given == [Flows("cubic"), Flows("bbr", 3, None, 0.2), Flows("reno", 2, (1, 0))]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("lab", "nothing to run; write a command after --"),
        ("lab --loss 2 -- true", "loss is 2.0"),
        ("lab --hosts 1 -- true", "hosts is 1"),
        ("lab --mtu 100 -- true", "mtu is 100"),
        ("lab verify --profile nowhere", "no profile is called 'nowhere'"),
        ("lab verify --link 0-0:loss=0.1", "two hosts that differ"),
        ("lab verify --link 0-1", "WHERE:NAME=N"),
        ("lab verify --port 7:up_mbit=1", "host is 7"),
        ("lab verify --port 0-1:loss=0.3", "'0-1'"),
        ("lab verify --link 1:up_mbit=10", "'1'"),
        ("lab verify --sites 2 --link wan:loss=0.3", "'wan'"),
        ("lab --wan loss=1% -- true", "there is one; set --sites"),
        ("lab --sites 2 --wan los=1% -- true", "neither links nor gateways have a los"),
        ("lab --sites 40 --hosts 2 -- true", "hosts is 2, wanted a whole number from 1 to 1"),
        ("lab --ranks 3,2,1 -- true", "wanted one number, or one for each of 2 hosts"),
        ("lab verify --file /nonexistent.json", "can't read the network"),
        ("lab verify --jitter-ms 3", "jitter_ms is 3.0"),
        ("lab --policer-ms 5 -- true", "wanted a rate that it polices, too"),
        ("lab --congestion a/b -- true", "congestion is 'a/b'"),
        ("lab --at 5 -- true", "--at '5' isn't SECONDS:[WHERE:]NAME=N,..., as in 5:rate=10"),
        ("lab --at=-1:loss=1% -- true", "isn't SECONDS:"),
        ("lab --loss -1% -- true", "loss is -0.01, wanted a fraction"),
        ("lab --delay-ms -5ms -- true", "delay_ms is -5.0"),
        ("lab --up-mbit -1g -- true", "up_mbit is -1000.0"),
        ("lab --at -1:loss=1% -- true", "--at '-1:loss=1%' isn't SECONDS:"),
        ("lab --at nan:loss=1% -- true", "isn't SECONDS:"),
        ("lab --at 5:hosts=3 -- true", "neither links nor ports have a hosts"),
        ("lab --at 5:loss=x -- true", "loss is 'x', wanted a number"),
        ("lab --at 5:0-2:loss=1% -- true", "host is 2"),
        ("lab --at 5:0-1:up=1 -- true", "a link has no up_mbit"),
        ("lab --at 1:policer=5 -- true", "wanted a rate that it polices, too"),
        *(
            (f"lab --tcp={text} -- true", complaint)
            for text, complaint in {
                "reno:1:0-2": "host is 2",
                "": "congestion is ''",
                "cubic:x": "'cubic:x' isn't NAME[:COUNT[:A-B]][@SHARE], as in cubic:2",
                "cubic:0": "TCP flows is 0",
                "cubic:1:0": "link is '0', wanted SENDER-RECEIVER",
                "cubic:1:0-1-2": "link is '0-1-2'",
                "cubic@": "share is ''",
                "cubic@120%": "share of the time is 1.2",
            }.items()
        ),
        ("lab verify --tcp reno", "--at and --tcp are of a job"),
        ("lab --counters /dev/null/x -- true", "cannot write to /dev/null/x"),
    ],
)
def test_the_command_refuses(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("lossycoll lab: ")
    assert complaint in said
    assert said.count("\n") == 1

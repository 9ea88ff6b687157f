"""Jobs in a laboratory, and what is left when it ends: nothing, whatever ended it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lossycoll.errors import LabError
from lossycoll.lab import Lab, Link, Network, Port, leftovers
from tests.support.lab_kit import ROOT, command, eventually, made_by, needs_lab, of_lab

pytestmark = needs_lab

SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]


def test_ranks_reduce_over_the_lossy_links(tmp_path: Path) -> None:
    """lossy and gloo side by side in one job of the command; what was counted is written down."""
    out = tmp_path / "counters.json"
    job = (sys.executable, str(ROOT / "tests" / "support/lab_ranks.py"))
    network = ("--hosts", "2", "--loss", "0.02", "--delay-ms", "1", "--backend", "switch")
    with command(*network, "--counters", str(out), "--", *job) as process:
        text, _ = process.communicate(timeout=150)
    assert process.returncode == 0, text
    lines = [line for line in text.splitlines() if '"rank"' in line]
    said = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in lines}
    assert set(said) == {"[0]", "[1]"}
    for mine in said.values():
        assert mine["gloo"] == [3.0]
        # The sum of both, or twice what one of them had: nothing is filled with zeros.
        assert set(mine["lossy"]) <= {2.0, 3.0, 4.0}
        assert 3.0 in mine["lossy"]
    assert sum(mine["missing"] for mine in said.values()) > 0
    counted = json.loads(out.read_text())
    assert counted["network"]["link"]["loss"] == 0.02
    assert all(counted["links"][name]["lost"] > 0 for name in ("0-1", "1-0"))


@pytest.mark.parametrize(("ends", "status"), [("", 2), ("; exit 3", 3)])
def test_counters_that_can_not_be_written_at_the_end_are_said(
    ends: str, status: int, tmp_path: Path
) -> None:
    """And a job's own failure goes before that."""
    folder = tmp_path / "away"
    folder.mkdir()
    script = f"rm -rf {folder}{ends}"
    line = ("--backend", "switch", "--counters", str(folder / "counters.json"), "--", "sh", "-c")
    with command(*line, script) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == status, text
    assert "counters.json can't be written: No such file or directory" in text
    assert "Traceback" not in text


SCRIPT = """\
echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"
touch $SAID.$RANK
[ $RANK = 1 ] || exec sleep 600
while ! [ -e $SAID.0 -a -e $SAID.2 ]; do sleep 0.05; done
exit 7
"""
"""Rank 1 ends when the others have said something."""


def test_output_status_and_the_end_of_ranks(tmp_path: Path) -> None:
    with Lab(hosts=3) as lab:
        ended = lab.run(["sh", "-c", SCRIPT], {"SAID": str(tmp_path / "said")}, grace=0.5)
        assert [one.output for one in ended] == [f"{i} of 3 at 10.77.0.1\n" for i in range(3)]
        assert [one.status for one in ended] == [128 + signal.SIGTERM, 7, 128 + signal.SIGTERM]
        # What won't end when it is asked to is killed.
        for timeout in (0.3, 3.0, 30.0):  # a busy machine may not have begun by the first
            script = "trap '' TERM; echo deaf; while :; do sleep 1; done"
            (deaf,) = lab.run(["sh", "-c", script], timeout=timeout, ranks=1)
            if deaf.output:
                break
        assert (deaf.output, deaf.code) == ("deaf\n", -signal.SIGKILL)
        (missing,) = lab.run(["/nonexistent/program"], ranks=1)
        assert (missing.code, "cannot run /nonexistent/program" in missing.output) == (127, True)
        env = lab.run(["sh", "-c", "echo $RANK $THIS $HOME"], {"THIS": "x", "HOME": None}, ranks=1)
        assert env[0].output == "0 x\n"
        left = lab.start(2, SLEEP, stdout=subprocess.PIPE, text=True)
        assert left.stdout is not None
        assert left.stdout.readline() == "up\n"
        late = lab.start(1, SLEEP)
        name = lab.name
        assert left.pid in of_lab(name)
    left.stdout.close()
    assert left.wait(5) == late.wait(5) == -signal.SIGKILL
    assert of_lab(name) == []
    with pytest.raises(LabError, match="started before"), lab:
        pass


def test_hosts_see_their_network_and_nothing_else() -> None:
    here = set(os.listdir("/sys/class/net"))
    with Lab(Network(hosts=2, mtu=1400)) as lab:
        (shown,) = lab.run(["ip", "-json", "addr"], ranks=1)
        devices = {one["ifname"]: one for one in json.loads(shown.output)}
        assert set(devices) == {"lo", "eth0"}
        assert devices["eth0"]["mtu"] == 1400
        assert devices["eth0"]["addr_info"][0]["local"] == lab.address(0) == "10.77.0.1"
        assert set(os.listdir("/sys/class/net")) == here
    assert set(os.listdir("/sys/class/net")) == here


@pytest.mark.parametrize(
    ("which", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 130, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_the_job_in_order(which: signal.Signals, status: int) -> None:
    trap = "trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    with command("--backend", "switch", "--", "sh", "-c", trap) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while sum("up" in line for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(which)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == status, text
    assert text.count("told") == 2
    assert eventually(lambda: not made_by(process.pid))


def test_a_reader_that_has_enough_ends_the_job() -> None:
    """As in `lossycoll lab -- CMD | head`."""
    line = ("--backend", "switch", "--", "yes")
    with command(*line, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()[3:] == " y\n"
        process.stdout.close()
        process.stdout = None  # for whoever reads what is left
        assert process.wait(60) == 141  # as a shell reports SIGPIPE
        said = process.stderr.read()
    assert "Traceback" not in said
    assert eventually(lambda: not made_by(process.pid))


def test_a_job_under_nohup_goes_on_when_its_terminal_hangs_up(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"echo up; while ! [ -e {go} ]; do sleep 0.05; done"
    line = ("--backend", "switch", "--", "sh", "-c", wait)
    with command(*line, hang_up=signal.SIG_IGN) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while sum("up" in line for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGHUP)
        go.touch()
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text


def test_a_killed_laboratory_leaves_nothing() -> None:
    """Not even what a rank started and then forgot."""
    forget = f"setsid {' '.join(SLEEP[:2])} -c 'import time; time.sleep(600)' & echo up; wait"
    with command("--backend", "switch", "--", "sh", "-c", forget) as process:
        assert process.stdout is not None
        while "up" not in process.stdout.readline():
            assert process.poll() is None
        assert eventually(lambda: len(made_by(process.pid)) >= 5)  # 2 shells, 2 others, the switch
        process.kill()
        process.wait()
        assert eventually(lambda: not made_by(process.pid))


# Any laboratory that starts meanwhile, also another test's, would clean up before this test looks.
@pytest.mark.serial
def test_what_a_killed_switch_leaves_is_found_and_cleaned() -> None:
    with command("--backend", "switch", "--", *SLEEP) as process:
        assert process.stdout is not None
        # Both ranks: one that is still entering its host can't, once the switch is gone.
        for _ in range(2):
            while "up" not in process.stdout.readline():
                assert process.poll() is None
        assert len(made_by(process.pid)) == 3
        (switch,) = (one for one in made_by(process.pid) if " switch " in one.command)
        os.kill(switch.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    left = [one.pid for one in made_by(process.pid) if one.pid != switch.pid]
    assert len(left) == 2
    assert not any(one.alive for one in made_by(process.pid))
    with Lab(), Lab() as other:
        # The next laboratory has cleaned up; two of them at once are not in each other's way.
        assert made_by(process.pid) == []
        assert other.run(["true"])[0].code == 0
        assert all(one.alive for one in leftovers.find())


def test_a_switch_that_dies_is_an_error_that_says_so() -> None:
    with Lab(Network(link=Link(loss=0.5), port=Port(up_mbit=5))) as lab:
        os.kill(lab._running().pid, signal.SIGKILL)
        with pytest.raises(LabError, match="ended with status -9"):
            lab.change(loss=0)


@pytest.mark.serial
def test_check_and_clean_of_the_command() -> None:
    with command("check", "--json") as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    findings = {one["name"]: one for one in json.loads(text)}
    assert findings["backend switch"]["good"]
    with command("clean") as process:
        text, _ = process.communicate(timeout=60)
    assert (process.returncode, text.splitlines()[-1]) == (0, "0 leftovers")

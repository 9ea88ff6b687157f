"""Peers of a swarm in `lossycoll status`: rounds, and who is sick, slow, out of reach or dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lossycoll.cli.answer import EXIT_FAILED
from lossycoll.cli.main import main
from lossycoll.cli.status import swarm_as_text
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.swarm import peer_status
from lossycoll.runtime.swarm.peer_status import PeerFile, swarms
from tests.support.waiting import until

REPORT: dict[str, Any] = {"round": 4, "members": (1, 2), "seconds": 0.5, "waited": 0.1}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "lossycoll"


def test_peers_that_average_are_shown_with_who_is_sick(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    from lossycoll import MoshpitAverager, Swarm

    with ExitStack() as stack:
        made = [stack.enter_context(Swarm("127.0.0.1:0", name="first"))]
        made += [stack.enter_context(Swarm(join=[made[0].address], name=n)) for n in ("b", "c")]
        tensors = [[torch.full((100,), float(n))] for n in range(3)]
        tensors[2][0][7] = torch.nan
        averagers = [MoshpitAverager(s, t) for s, t in zip(made, tensors, strict=True)]
        for one in made:
            one.wait_for(3)
        threads = [threading.Thread(target=one.step, kwargs={"timeout": 30.0}) for one in averagers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (swarm,) = swarms()
        assert main(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["swarms"][0]["rounds"] == swarm["rounds"]
        assert main(["status"]) == 0
        said = capsys.readouterr().out
    assert sorted(peer["name"] for peer in swarm["peers"]) == ["b", "c", "first"]
    assert (swarm["peers_in_all"], swarm["rounds"] >= 1) == (3, True)
    assert all(peer["state"] == "alive" and peer["rounds"] == 1 for peer in swarm["peers"])
    assert any(line.startswith("peer c is sick: ") for line in swarm["trouble"])
    assert "3 peers here, 3 in all" in said
    assert "peer c is sick" in said
    assert swarms() == []  # all have left


def test_slow_peers_and_those_out_of_reach_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [PeerFile("s", name) for name in ("a", "b")]
    files[0].averaged(5, 1, REPORT | {"missing": (2,), "absent": (("far", "no route"),)})
    files[1].averaged(5, 2, REPORT | {"round": 3, "refused": (1,), "failure": "a link is dead"})
    (swarm,) = swarms()
    assert swarm["trouble"] == [
        "peer b was lost to peer a in round 4",
        "round 3 of peer b failed: a link is dead",
        "peer a wasn't believed by peer b in round 3",
        "peer far wasn't in round 4: no route",
    ]
    monkeypatch.setattr(peer_status, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(peer_status, "SLOW_ROUNDS", 0)
    until(lambda: "peer a is slow: no round for 0 s (trains)" in swarms()[0]["trouble"], "a's word")
    files[0].waits(5)
    until(lambda: "peer a is slow: no round for 0 s (waits)" in swarms()[0]["trouble"], "a's wait")
    for one in files:
        one.close()


def test_a_peer_that_was_killed_is_dead_and_goes_after_a_while(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time; from lossycoll.runtime.swarm.peer_status import PeerFile;"
        "PeerFile('s', 'killed').waits(2); print('here', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: swarms()[0]["trouble"] == ["peer killed is stopped"])
    child.kill()
    child.wait()
    child.stdout.close()
    assert swarms()[0]["trouble"] == ["peer killed is dead"]
    monkeypatch.setattr(peer_status, "KEPT_SECONDS", -1.0)
    assert swarms() == []
    assert not list(own_folder.glob("*.peer"))


def test_a_peer_that_can_not_be_looked_up_is_dead_when_it_is_silent_for_long(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has gone. Between two rounds a peer writes nothing."""
    file = PeerFile("s", "a")
    file.averaged(1, 1, REPORT)
    space = status_page.space()
    monkeypatch.setattr(status_page, "space", lambda: space + 1)
    assert swarms()[0]["peers"][0]["state"] == "alive"
    monkeypatch.setattr(peer_status, "UNSEEN_SECONDS", -1.0)
    monkeypatch.setattr(peer_status, "SLOW_ROUNDS", -1)
    assert swarms()[0]["trouble"] == ["peer a is dead"]
    monkeypatch.setattr(peer_status, "KEPT_SECONDS", -1.0)
    assert swarms() == []
    assert not list(own_folder.glob("*.peer"))
    file.close()


def test_what_is_no_peers_file_is_left_out(own_folder: Path) -> None:
    PeerFile("s", "a").waits(1)
    (whole,) = own_folder.glob("*.peer")
    for number, text in enumerate(("", "{", "[]", "7", "{}", whole.read_text()[:-9], "\x00" * 99)):
        (own_folder / f"x-{number}.peer").write_text(text)
    (own_folder / "link.peer").symlink_to(whole)
    (own_folder / "folder.peer").mkdir()
    os.mkfifo(own_folder / "pipe.peer")
    assert [peer["name"] for peer in swarms()[0]["peers"]] == ["a"]


def test_status_off_shows_no_peer(own_folder: Path) -> None:
    from lossycoll import Options, Swarm

    with Swarm("127.0.0.1:0", name="quiet", options=Options(status="off")):
        assert swarms() == []
    assert not list(own_folder.glob("*.peer"))


def test_a_peer_that_waits_tells_its_latest_round_and_a_dead_one_its_last_sign() -> None:
    file = PeerFile("s", "a")
    file.averaged(1, 1, REPORT | {"members": (1,)})
    file.waits(1)
    (swarm,) = swarms()
    assert (swarm["rounds"], swarm["peers"][0]["doing"]) == (5, "waits")
    text = swarm_as_text(swarm)
    assert text.startswith("swarm s: 1 peer here, 1 in all, 5 rounds")
    assert "alive, waits for a round for" in text
    assert "; round 4 of 1 peer took" in text
    swarm["peers"][0] |= {"state": "dead", "since_seconds": 41.0}
    assert "dead, last sign 41.0 s ago; round 4" in swarm_as_text(swarm)
    file.close()


def test_top_shows_swarms(capsys: pytest.CaptureFixture[str]) -> None:
    file = PeerFile("s", "a")
    file.averaged(1, 1, REPORT)
    assert main(["top", "--once"]) == 0
    file.close()
    said = capsys.readouterr().out
    assert said.startswith("swarm s: 1 peer here")
    assert "no job" not in said


@pytest.mark.parametrize(
    "secret", [None, "a secret of tests that is long"], ids=["clear", "sealed"]
)
@pytest.mark.parametrize("command", ["status", "top"])
def test_a_directory_tells_the_peers_of_all_machines(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    secret: str | None,
    command: str,
) -> None:
    """Also where a directory that stands by is asked."""
    pytest.importorskip("torch")
    from lossycoll import Swarm

    if secret is not None:
        monkeypatch.setenv("LOSSYCOLL_SECRET", secret)
    arguments = [command, "--once"] if command == "top" else [command]
    with ExitStack() as stack:
        first = stack.enter_context(Swarm("127.0.0.1:0", name="first"))
        other = stack.enter_context(Swarm("127.0.0.1:0", join=[first.address], name="other"))
        for one in (first, other):
            assert main([*arguments, one.address]) == 0
            assert capsys.readouterr().out.splitlines() == [
                f"swarm with the directory {first.address}: 2 peers",
                "peer first",
                "peer other",
            ]
        if command == "status":
            assert main([*arguments, "--json", other.address]) == 0
            assert json.loads(capsys.readouterr().out) == {
                "jobs": [],
                "swarms": [],
                "directories": [{"address": first.address, "peers": ["first", "other"]}],
            }
        if secret is not None:
            monkeypatch.delenv("LOSSYCOLL_SECRET")
            assert main([*arguments, first.address]) == EXIT_FAILED
            streams = capsys.readouterr()
            assert "has a secret (LOSSYCOLL_SECRET)" in " ".join(
                f"{streams.out}{streams.err}".split()
            )

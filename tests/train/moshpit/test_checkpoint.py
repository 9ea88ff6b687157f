"""Checkpoints of a swarm's peer: whole or not there, and no danger to whoever reads them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lossycoll
from lossycoll import CheckpointError, MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.runtime.swarm.directory_tables import MOST_SAMPLES
from tests.support.new_network import ROOT
from tests.support.swarms import SECRET
from tests.train.moshpit.test_sgd import assert_alike, backward, inner, model, outer

NEW_MOUNTS = ["unshare", "--map-root-user", "--mount"]
HOWS: dict[str, dict[str, Any]] = {
    "parameters": {"every": 2},
    "outer": {"every": 2, "outer": outer},
    "gradients": {"every": 2, "average": "gradients"},
}
Made = Callable[..., tuple[nn.Module, MoshpitSGD]]


@pytest.fixture
def made() -> Iterator[Made]:
    """Peers of one swarm each."""
    with ExitStack() as stack:

        def make(trained: nn.Module | None = None, **how: Any) -> tuple[nn.Module, MoshpitSGD]:
            swarm = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET))
            own = trained or model()
            averager = MoshpitAverager(swarm, own.parameters())
            return own, MoshpitSGD(own, inner(own.parameters()), averager, **how)

        yield make


def steps(trained: nn.Module, optimizer: MoshpitSGD, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        backward(trained, 0, step)
        optimizer.step()


@pytest.mark.parametrize("how", HOWS)
def test_another_peer_goes_on_from_it(made: Made, tmp_path: Path, how: str) -> None:
    one, optimizer = made(**HOWS[how])
    steps(one, optimizer, range(4))
    optimizer.save(tmp_path / "state")
    torch.manual_seed(3)
    other, reborn = made(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), **HOWS[how])
    reborn.load(tmp_path / "state")
    steps(one, optimizer, range(4, 8))
    steps(other, reborn, range(4, 8))
    assert_alike([other], [one])


def test_peers_that_come_take_what_was_loaded(made: Made, tmp_path: Path) -> None:
    """A training begins again: one peer has the checkpoint, and had no round since."""
    before, optimizer = made(every=2)
    steps(before, optimizer, range(4))
    optimizer.save(tmp_path / "state")
    with ExitStack() as stack:
        first = stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name="0"))
        second = stack.enter_context(Swarm(join=[first.address], secret=SECRET, name="1"))
        own = model()
        averager = MoshpitAverager(first, own.parameters())
        MoshpitSGD(own, inner(own.parameters()), averager, every=2).load(tmp_path / "state")
        newcomer = model()
        averager = MoshpitAverager(second, newcomer.parameters())
        MoshpitSGD(newcomer, inner(newcomer.parameters()), averager, every=2)
        taken = averager.fetch_state(None, 4, 1 << 20)
    assert taken is not None
    wanted = torch.cat([p.detach().flatten() for p in before.parameters()])
    assert taken.snapshot.data[: 4 * len(wanted)].tobytes() == wanted.numpy().tobytes()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The former checkpoint stays, this peer goes on, and so does the other."""
    if subprocess.run([*NEW_MOUNTS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no mount namespace")
    done = subprocess.run(
        [*NEW_MOUNTS, sys.executable, "-m", "tests.support.full_disk", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_that_are_none(made: Made, tmp_path: Path) -> None:
    """Each is an error that says which file, and the peer has what it had."""
    own, optimizer = made(every=2)
    steps(own, optimizer, range(2))
    kept = [p.detach().clone() for p in own.parameters()]
    optimizer.save(tmp_path / "whole")
    (tmp_path / "torn").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    ran = tmp_path / "ran"

    class Danger:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    (tmp_path / "code").write_bytes(pickle.dumps(Danger(), 2))
    torch.save({"model": own.state_dict()}, tmp_path / "torch's")
    _, larger = made(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), every=2)
    larger.save(tmp_path / "larger")
    _, with_outer = made(every=2, outer=outer)
    with_outer.save(tmp_path / "outer")
    for name, said in (
        ("nothing", "No such file"),
        ("torn", "it isn't one, or not all of it"),
        ("code", "Weights only load failed"),
        ("torch's", "isn't one of this model and its optimizers"),
        ("larger", "size mismatch"),
        ("outer", r"it is of \['AdamW', 'SGD'\], and here are"),
    ):
        with pytest.raises(CheckpointError, match=f"(?s)checkpoint .*{name}: .*{said}"):
            optimizer.load(tmp_path / name)
        for parameter, before in zip(own.parameters(), kept, strict=True):
            assert torch.equal(parameter, before)
    assert not ran.exists()
    with pytest.raises(CheckpointError, match="No such file or directory; there is no folder"):
        optimizer.save(tmp_path / "no folder" / "state")


def test_several_write_to_one_file(made: Made, tmp_path: Path) -> None:
    """Each writes all of it: whoever reads has one of them, and nothing is left beside it."""
    (tmp_path / "link").symlink_to(tmp_path / "state")
    peers = [made(every=2) for _ in range(2)]
    failed: list[Exception] = []

    def write(optimizer: MoshpitSGD) -> None:
        try:
            for _ in range(8):
                optimizer.save(tmp_path / "link")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(optimizer,)) for _, optimizer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "state"]
    assert (tmp_path / "link").is_symlink()
    peers[0][1].load(tmp_path / "state")


KILLED = """
import os, signal, sys
import torch
from lossycoll.train.moshpit import checkpoint

def save(state, file):
    file.write(b"half")
    file.flush()
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print("writes", flush=True)
    sys.stdin.read()

torch.save = save
checkpoint.write(sys.argv[1], {})
"""


def test_what_killed_writers_leave_is_removed(made: Made, tmp_path: Path) -> None:
    """By the next save, or load. What a living one writes stays, and so do others' files."""
    file = tmp_path / "state"
    others = [tmp_path / name for name in ("state.part-12", "state2.part-" + "0" * 16, "part")]

    def writer(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, str(file), how]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def parts() -> list[Path]:
        found = sorted(one for one in tmp_path.glob("state.part-*") if one not in others)
        for one in (*found, *others):
            os.utime(one, (1e9, 1e9))  # for long nobody has written to it
        return found

    for one in others:
        one.touch()
    own, optimizer = made()
    steps(own, optimizer, range(2))
    optimizer.save(file)
    with writer("lives") as lives:
        assert lives.stdout is not None
        assert lives.stdout.readline() == "writes\n"
        (living,) = parts()
        for use in (lambda: optimizer.save(file), lambda: optimizer.load(file)):
            assert writer("dies").wait(60) == -signal.SIGKILL
            assert len(parts()) == 2
            use()
            assert parts() == [living]
        lives.kill()
    optimizer.save(file)
    assert parts() == []
    assert all(one.exists() for one in others)


def test_what_cannot_be_written(made: Made, tmp_path: Path, monkeypatch: Any) -> None:
    """A file that isn't whole never has the checkpoint's name."""
    own, optimizer = made(every=2)
    steps(own, optimizer, range(2))
    optimizer.save(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()
    steps(own, optimizer, range(2, 4))

    def fails(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("lossycoll.train.moshpit.checkpoint.os.fsync", fails)
    with pytest.raises(lossycoll.CheckpointError, match="Input/output error"):
        optimizer.save(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == before


def test_values_that_are_not_finite_are_no_state(made: Made, tmp_path: Path) -> None:
    """As the newest, they would become those of all peers."""
    own, optimizer = made(every=2)
    steps(own, optimizer, range(2))
    optimizer.save(tmp_path / "good")
    with torch.no_grad():
        own[0].weight[0, 0] = float("nan")  # type: ignore[index,operator]
    with pytest.raises(CheckpointError, match=r"values of 0\.weight aren't finite; take an earl"):
        optimizer.save(tmp_path / "good")
    state = torch.load(tmp_path / "good", weights_only=True)
    state["model"]["2.bias"][0] = float("inf")
    torch.save(state, tmp_path / "sick")
    other, another = made(every=2)
    before = [one.detach().clone() for one in other.parameters()]
    with pytest.raises(CheckpointError, match=r"sick: values of 2\.bias aren't finite"):
        another.load(tmp_path / "sick")
    assert all(map(torch.equal, before, other.parameters()))


def test_moments_that_are_not_finite_begin_again(made: Made, tmp_path: Path) -> None:
    own, optimizer = made(every=2)
    steps(own, optimizer, range(2))
    optimizer.save(tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    state["training"]["optimizers"][0]["state"][1]["exp_avg"][0] = float("nan")
    torch.save(state, tmp_path / "state")
    optimizer.load(tmp_path / "state")
    steps(own, optimizer, range(2, 4))
    assert all(bool(one.isfinite().all()) for one in own.parameters())


def test_samples_that_a_liar_has_claimed_spoil_no_checkpoint(made: Made, tmp_path: Path) -> None:
    """As many as a directory believes."""
    own, optimizer = made(every=2)
    optimizer._pace.samples = MOST_SAMPLES
    steps(own, optimizer, range(3))
    for name in ("first", "second"):
        optimizer.save(tmp_path / name)
        optimizer.load(tmp_path / name)
    assert MOST_SAMPLES <= optimizer.samples <= MOST_SAMPLES + 3


def test_a_memory_that_is_none_and_a_loop_of_links(made: Made, tmp_path: Path) -> None:
    own, optimizer = made(every=2)
    steps(own, optimizer, range(2))
    optimizer.save(tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    for memory in (7, {"of": optimizer._averager.name, "parts": [1]}):
        torch.save({**state, "memory": memory}, tmp_path / "other")
        before = [one.detach().clone() for one in own.parameters()]
        with pytest.raises(CheckpointError, match="its memory of rounding is malformed"):
            optimizer.load(tmp_path / "other")
        assert all(map(torch.equal, before, own.parameters()))
    with pytest.raises(CheckpointError, match="embedded null byte"):
        optimizer.save("a\0b")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match="checkpoint "):
        optimizer.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="checkpoint "):
        optimizer.load(tmp_path / "a")

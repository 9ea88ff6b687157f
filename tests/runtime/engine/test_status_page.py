"""Status pages: who may read them, what is believed of them, and when they go."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_page import Job, StatusPage, UnsafeFolder, pages, read_page
from lossycoll.runtime.engine.status_record import Record, step_seconds

JOB = Job(session=0xABC, ranks=(10, 11, 12), liveness=10.0, control="[::1]:7", sealed=True)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "lossycoll"


def made() -> StatusPage:
    """A page as the engine finds it, with its magic number, which the engine writes."""
    page = StatusPage(1, JOB)
    head = status_page.ffi.new("lc_page *")
    head.magic, head.version = status_page.lib.LC_PAGE_MAGIC, status_page.lib.LC_PAGE_VERSION
    os.pwrite(page.file, bytes(status_page.ffi.buffer(head))[:8], 0)
    turn = time.monotonic_ns().to_bytes(8, "little")
    os.pwrite(page.file, turn, status_page.ffi.offsetof("lc_page", "turn_ns"))
    return page


def test_a_page_says_whose_it_is_and_is_this_users_alone(own_folder: Path) -> None:
    page = made()
    (record,) = pages()
    assert (record.session, record.world, record.process) == (f"{0xABC:016x}", 3, 1)
    assert (record.rank, record.pid, record.state) == (11, os.getpid(), status_page.RUNS)
    assert [peer.rank for peer in record.peers] == [10, 11, 12]
    assert (record.control, record.sealed, record.groups) == ("[::1]:7", True, ())
    assert own_folder.stat().st_mode & 0o777 == 0o700
    assert page.path.stat().st_mode & 0o777 == 0o600
    assert len(pages(0xABC)) == 1
    assert pages(0xABD) == []
    page.close()
    assert pages() == []


def test_the_folder_is_in_memory_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert status_page.folder() == Path(f"/dev/shm/lossycoll-{os.getuid()}")
    monkeypatch.setattr(status_page, "MEMORY", Path("/nowhere"))
    assert status_page.folder() == Path(f"/tmp/lossycoll-{os.getuid()}")


@pytest.mark.parametrize("how", ["mode", "link", "file", "owner"])
def test_a_folder_that_others_can_reach_is_refused(how: str, own_folder: Path) -> None:
    wanted = {"mode": "mode 0755", "link": "no folder", "file": "no folder", "owner": "user 12345"}
    if how == "link":
        (own_folder.parent / "other").mkdir(0o700)
        own_folder.symlink_to(own_folder.parent / "other")
    elif how == "file":
        own_folder.touch()
    else:
        own_folder.mkdir(0o755 if how == "mode" else 0o700)
    if how == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(own_folder, 12345, 12345)
    for use in (pages, made):
        with pytest.raises(UnsafeFolder, match=wanted[how]):
            use()


def test_what_is_no_page_is_left_out(own_folder: Path) -> None:
    page = made()
    whole = page.path.read_bytes()
    draw = random.Random(7)
    strange = [
        b"",
        b"\0" * 64,
        whole[:-1],
        whole + b"\0",
        draw.randbytes(len(whole)),
        draw.randbytes(4096),
        b"\0\0\0\0" + whole[4:],
    ]
    for number, data in enumerate(strange):
        (own_folder / f"{0xABC:016x}.9.{number}").write_bytes(data)
    (own_folder / f"{0xABC:016x}.9.link").symlink_to(page.path)
    os.mkfifo(own_folder / f"{0xABC:016x}.9.pipe")
    (own_folder / f"{0xABC:016x}.9.folder").mkdir()
    assert [record.pid for record in pages()] == [os.getpid()]
    page.close()


def test_damaged_figures_are_read_as_something_or_refused() -> None:
    """Whoever can write the file is the user; a reader must not fail by it."""
    page = made()
    whole = bytearray(page.path.read_bytes())
    draw = random.Random(11)
    other = page.path.with_name(f"{0xABC:016x}.9.9")
    read = 0
    for number in range(60):
        damaged = bytearray(whole)
        first = 8 if number % 2 else status_page.ffi.offsetof("lc_page", "pid_start")
        for at in (draw.randrange(first, 6000) for _ in range(200)):
            damaged[at] = draw.randrange(256)
        for at in (draw.randrange(first, len(damaged)) for _ in range(200)):
            damaged[at] = draw.randrange(256)
        other.write_bytes(damaged)
        try:
            record = read_page(other)
        except ValueError:
            continue
        read += 1
        json.dumps(record.to_json())
    assert read >= 30
    other.write_bytes(whole)
    assert read_page(other).world == 3
    page.close()


def test_a_page_that_is_never_finished_is_read_as_it_is() -> None:
    page = made()
    at = status_page.ffi.offsetof("lc_page", "sequence")
    os.pwrite(page.file, b"\1", at)
    assert [record.world for record in pages()] == [3]
    page.close()


def _child_page(state: str) -> subprocess.Popen[bytes]:
    """A process with a page, that is asleep, stopped or killed."""
    code = (
        "import sys, time; sys.path.insert(0, '.');"
        "from tests.runtime.engine.test_status_page import made; page = made();"
        "print('here', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    if state == "stopped":
        child.send_signal(signal.SIGSTOP)
    elif state == "dead":
        child.kill()
        child.wait()
    return child


def test_the_kernel_says_what_has_become_of_a_process(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of one that was killed goes after a while, unless others of its job live."""
    child = _child_page("stopped")
    try:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert [one.state for one in pages()] == [status_page.STOPPED]
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert [one.state for one in pages()] == [status_page.DEAD]
    assert [one.state for one in pages()] == [status_page.DEAD], "it was removed at once"
    monkeypatch.setattr(status_page, "KEPT_SECONDS", -1.0)
    page = made()
    assert len(pages()) == 1, "making a page removes those of jobs that have ended"
    page.close()


def test_a_number_of_another_process_is_no_proof_of_life() -> None:
    pid, space = os.getpid(), status_page.space()
    start = status_page.start_of(pid)
    assert status_page.state_of(pid, start, space) == status_page.RUNS
    assert status_page.state_of(pid, start + 1, space) == status_page.DEAD
    assert status_page.state_of(pid, start, space + 1) == status_page.ELSEWHERE


@pytest.mark.parametrize("remove", [pages, made])
def test_a_page_whose_process_can_not_be_looked_up_goes_when_nothing_is_written(
    remove: Callable[[], object], own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a job in a container that has gone, where the folder is the host's."""
    page = made()
    there = own_folder / f"{0xABD:016x}.1.{2**22 + 1}"
    there.write_bytes(page.path.read_bytes())
    page.close()
    space = status_page.space()
    monkeypatch.setattr(status_page, "space", lambda: space + 1)
    assert [one.state for one in pages()] == [status_page.ELSEWHERE]
    at = status_page.ffi.offsetof("lc_page", "turn_ns")
    for ago, is_gone in ((0, False), (59, False), (61, True)):
        with there.open("r+b") as file:
            file.seek(at)
            # 0: an engine that is only being started has written nothing.
            file.write((ago and time.monotonic_ns() - ago * 10**9).to_bytes(8, "little"))
        assert status_page.is_gone(read_page(there)) is is_gone
        assert there.exists()
        removed = remove()
        assert there.exists() is not is_gone
        if isinstance(removed, StatusPage):
            removed.close()


def test_a_record_survives_json_and_nothing_else_is_taken_for_one() -> None:
    page = made()
    (record,) = pages()
    page.close()
    said: dict[str, Any] = json.loads(json.dumps(record.to_json()))
    assert Record.from_json(said) == record
    for change in (
        {"world": 4},
        {"world": "3"},
        {"process": -1},
        {"process": 3},
        {"rank": 1.5},
        {"rank": True},
        {"host": 7},
        {"host": "x" * 5000},
        {"liveness": "1"},
        {"liveness": float("nan")},
        {"liveness": 10**400},
        {"peers": [{}] * 3},
        {"peers": None},
        {"groups": [1]},
        {"stats": []},
        {"stats": {"a": "b"}},
        {"more": 1},
    ):
        with pytest.raises(ValueError, match=r"wanted a |fit together"):
            Record.from_json(said | change)
    for value in (None, [], "x", {}):
        with pytest.raises(ValueError, match="wanted a Record"):
            Record.from_json(value)
    assert Record.from_json(said | {"host": "a\x1b[2Jb"}).host == "a?[2Jb"


def test_steps_are_told_by_what_repeats() -> None:
    names = ["init"] * 3 + [*"AAB"] * 6
    calls = [(name, float(at)) for at, name in enumerate(names)]
    assert step_seconds(calls) == 3.0
    assert step_seconds(calls[:1]) == -1.0
    assert step_seconds([(at, float(at)) for at in range(20)]) == -1.0
    assert step_seconds([]) == -1.0


def test_a_call_now_and_then_does_not_hide_the_step() -> None:
    """As where a script validates, or measures drift."""
    names = [*"AAB" * 4, "drift", *"AAB" * 14]
    calls = [(name, float(at)) for at, name in enumerate(names)]
    assert step_seconds(calls) == 3.0
    assert step_seconds(calls[:20]) == -1.0, "too few steps since"
    equal = [*"A" * 20, "B"] * 3  # of one step's many equal calls nothing follows
    assert step_seconds([(name, float(at)) for at, name in enumerate(equal)][:60]) in (21.0, -1.0)


def test_a_dead_process_keeps_nobody_from_a_page() -> None:
    """As where a number and a session come again."""
    first = made()
    again = StatusPage(1, replace(JOB, sealed=False))
    assert first.path == again.path
    again.close()
    first.close()

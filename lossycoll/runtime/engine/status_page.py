"""A process's status page: made for the engine to write, and read by anybody of the same user.

The engine writes it (native/page.c), with no help of Python, so it can be read while calls hang,
while the process is stopped, and after it was killed. Times in it are by CLOCK_MONOTONIC.

Pages are in a folder of this user alone, in memory where there is some. Others could lie to the
user, or learn what the job does: a folder of another owner, of a wider mode, or by a link is
refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lossycoll._native import ffi, lib

from .reports import data_of
from .status_record import (
    MOST_REAL,
    CallRecord,
    GroupRecord,
    PeerRecord,
    Record,
    step_seconds,
)

DEAD, STOPPED, RUNS, ELSEWHERE = "dead", "stopped", "runs", "elsewhere"
_STATES: Final = {"Z": DEAD, "X": DEAD, "x": DEAD, "T": STOPPED, "t": STOPPED}


def space() -> int:
    """The namespace in which this process counts processes; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third one on: names have spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def start_of(pid: int) -> int:
    """When a process began, in ticks of the machine; 0: it isn't there, or that can't be told."""
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def state_of(pid: int, start: int, of_space: int) -> str:
    """State of a process by the kernel's word."""
    if of_space != space():
        return ELSEWHERE
    try:
        fields = _stat(pid)
        began = int(fields[19])
    except FileNotFoundError:
        return DEAD
    except (OSError, ValueError, IndexError):
        return ELSEWHERE
    return DEAD if began != start else _STATES.get(fields[0], RUNS)


NAME: Final = "lossycoll"
MEMORY: Final = Path("/dev/shm")
"""Taken where the user has no folder of its own: writes to a page there never wait for a disk."""
DISK: Final = Path("/tmp")


class UnsafeFolder(OSError):
    """The folder isn't this user's alone."""


def folder() -> Path:
    """Folder of this user's pages: in XDG_RUNTIME_DIR, else in memory, else on the disk."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own) and os.path.isdir(own) and os.stat(own).st_uid == os.getuid():
        return Path(own) / NAME  # sudo may have kept another user's
    return (MEMORY if os.path.isdir(MEMORY) else DISK) / f"{NAME}-{os.getuid()}"


def make_folder() -> Path:
    path = folder()
    try:
        path.mkdir(0o700)
    except FileExistsError:
        check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raises UnsafeFolder for a folder that others can write to, read or enter, and for a link."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{path} is no folder; remove it")
    if found.st_uid != os.getuid():
        raise UnsafeFolder(f"{path} belongs to user {found.st_uid}, wanted {os.getuid()}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafeFolder(f"{path} has mode {mode:04o}, wanted 0700: chmod 700 {path}")


def open_page(path: Path) -> int:
    """Opens a page to read it; returns the descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise UnsafeFolder(f"{path} is no file of user {os.getuid()}")
    return descriptor


MOST_BYTES: Final = 1 << 28
TRIES: Final = 20
"""Looks at a page that is being written. A writer takes microseconds, unless it is stopped then."""
KEPT_SECONDS: Final = 60.0
"""Time that a dead process's page is kept after its job's end, and after which a process that can't
be looked up is taken for dead if it writes nothing."""
MOST_READ: Final = 32
"""Pages of processes that have ended, which making a page reads at most."""
CLOSED: Final = -1


@dataclass(frozen=True, slots=True)
class Job:
    """Job that a page's process belongs to."""

    session: int  # The job's, 64 bits
    ranks: Sequence[int]  # torch's global rank of each process
    liveness: float  # Seconds within which a silent rank is named
    control: str  # Where this process's control plane listens, as ADDRESS:PORT
    sealed: bool  # Whether what leaves the machine is sealed


class StatusPage:
    """This process's page as a file, for the engine to map. ``close`` removes it. ``file``: its
    descriptor; CLOSED once the engine has mapped it."""

    def __init__(self, process: int, job: Job) -> None:
        where = make_folder()
        _remove_old(where)
        pid = os.getpid()
        self.path: Final = where / f"{job.session:016x}.{process}.{pid}"
        self._pid = pid
        world = len(job.ranks)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.open(self.path, flags, 0o600)
        try:
            # Reserved: a write to a page for which there is no room would end the process.
            os.posix_fallocate(self.file, 0, lib.lc_page_bytes(world))
            os.pwrite(self.file, _head(process, pid, job), 0)
        except OSError:
            self.close()
            raise

    def handed_over(self) -> None:
        """The engine has mapped it."""
        os.close(self.file)
        self.file = CLOSED

    def close(self) -> None:
        """Removes it; a forked child leaves it."""
        if self.file != CLOSED:
            self.handed_over()
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _head(process: int, pid: int, job: Job) -> bytes:
    world = len(job.ranks)
    head = ffi.new("lc_page *")
    head.world, head.process, head.pid = world, process, pid
    head.pid_start, head.pid_space = start_of(pid), space()
    head.session, head.liveness_ns = job.session, int(job.liveness * 1e9)
    head.sealed = job.sealed
    head.host, head.control = _text(socket.gethostname()), _text(job.control)
    peers = ffi.new("lc_page_peer[]", world)
    for peer, rank in zip(peers, job.ranks, strict=True):
        peer.rank = rank
    return bytes(ffi.buffer(head)) + bytes(ffi.buffer(peers))


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")[: lib.LC_PAGE_TEXT - 1]


# ---- reading ----


def _remove_old(where: Path) -> None:
    """Removes pages of jobs that have ended. It reads few, and none of processes that run: a job's
    start must not take longer where many jobs run."""
    by_session: dict[str, list[Path]] = {}
    for path in sorted(where.glob("*.*.*")):
        by_session.setdefault(path.name.partition(".")[0], []).append(path)
    ended = [
        path
        for paths in by_session.values()
        if not any(Path("/proc", path.name.rpartition(".")[2]).exists() for path in paths)
        for path in paths
    ]
    for path in ended[:MOST_READ]:
        with contextlib.suppress(OSError, ValueError):
            record = read_page(path)
            if is_gone(record) and _is_old(record):
                path.unlink()


def pages(session: int | None = None, *, calls: bool = False) -> list[Record]:
    """Records of this user's processes on this machine, of the job ``session`` or of all. Without
    damaged pages, and those of jobs that ended long ago, which are removed."""
    where = folder()
    try:
        check_folder(where)
    except FileNotFoundError:
        return []
    found = []
    for path in sorted(where.glob(f"{session:016x}.*" if session is not None else "*.*.*")):
        with contextlib.suppress(OSError, ValueError):
            found.append((path, read_page(path, calls=calls)))
    alive = {record.session for _, record in found if not is_gone(record)}
    kept = []
    for path, record in found:
        if record.session in alive or not _is_old(record):
            kept.append(record)
            continue
        with contextlib.suppress(OSError):
            path.unlink()
    return kept


def is_gone(record: Record) -> bool:
    """True if the process is dead, or can't be looked up (as one in a container) and its engine
    has written nothing for long: engines that run do, also when nothing is to be done."""
    return record.state == DEAD or (record.state == ELSEWHERE and record.written > KEPT_SECONDS)


def _is_old(record: Record) -> bool:
    """True if the engine's last word is of long ago, or of before the machine was started."""
    return not 0 <= record.written <= KEPT_SECONDS


def read_page(path: Path, *, calls: bool = False) -> Record:
    """The record of a page, with times as seconds before now."""
    file = open_page(path)
    try:
        size = os.fstat(file).st_size
        if not ffi.sizeof("lc_page") <= size <= MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes")
        data = _steady(file, size)
    finally:
        os.close(file)
    return _record(path, data, time.monotonic_ns(), calls)


def _steady(file: int, size: int) -> bytes:
    """The bytes of a page between two writes; as they are, if its writer never finishes one."""
    at, bits = ffi.offsetof("lc_page", "sequence"), ffi.sizeof("uint32_t")
    data = b""
    for attempt in range(TRIES):
        data = os.pread(file, size, 0)
        before = data[at : at + bits]
        if not before[:1] or (before[0] % 2 == 0 and os.pread(file, bits, at) == before):
            break
        time.sleep(0.0001 * attempt)
    return data


def _record(path: Path, data: bytes, now: int, whole: bool) -> Record:
    base = ffi.cast("uint8_t *", ffi.from_buffer(data))
    head = ffi.cast("lc_page *", base)
    wanted = (lib.LC_PAGE_MAGIC, lib.LC_PAGE_VERSION)
    size = lib.lc_page_bytes(head.world)
    if (head.magic, head.version) != wanted or len(data) != size or head.process >= head.world:
        raise ValueError(f"{path} is no status page of this version")
    pid = int(head.pid)
    peers = ffi.cast("lc_page_peer *", base + ffi.sizeof("lc_page"))
    first = ffi.cast("uint8_t *", peers + head.world)
    block_bytes = (size - int(first - base)) // lib.LC_PAGE_GROUPS  # the page's own may be damaged
    blocks = [first + i * block_bytes for i in range(lib.LC_PAGE_GROUPS)]
    return data_of(
        Record,
        head,
        session=f"{head.session:016x}",
        rank=int(peers[head.process].rank),
        pid=pid,
        host=_read_text(head.host),
        control=_read_text(head.control),
        sealed=bool(head.sealed),
        liveness=head.liveness_ns * 1e-9,
        state=state_of(pid, head.pid_start, head.pid_space),
        written=_ago(now, head.turn_ns),
        groups=tuple(
            _group(block, head.world, now, block_bytes, whole)
            for block in blocks
            if ffi.cast("lc_page_group *", block).number
        ),
        peers=tuple(_peer(peers[i], now) for i in range(head.world)),
        stats={name: int(getattr(head.stats, name)) for name, _ in ffi.typeof("lc_stats").fields},
    )


def _peer(c: Any, now: int) -> PeerRecord:
    return data_of(
        PeerRecord,
        c,
        heard=_ago(now, max(c.heard_ns, c.heartbeat_ns)),
        rtt=c.rtt_ns * 1e-9,
        queue=c.queue_ns * 1e-9,
        rate=_finite(c.rate),
        loss=_finite(c.link_loss),
        burst=_finite(c.link_burst),
    )


def _group(block: Any, world: int, now: int, size: int, whole: bool) -> GroupRecord:
    c = ffi.cast("lc_page_group *", block)
    members = ffi.cast("uint16_t *", c + 1)
    words = (world + 63) // 64
    absent = ffi.cast("uint64_t *", block + size) - words
    ranks = min(int(c.size), world)
    calls = sorted((one for one in c.calls if one.op), key=lambda one: int(one.op))
    pending = [one for one in calls if not one.end_ns]
    messages = [one for one in c.messages if one.op]
    return data_of(
        GroupRecord,
        c,
        name=_read_text(c.name),
        members=tuple(int(members[i]) for i in range(ranks)),
        usual=c.usual_ns * 1e-9,
        waiting=_call(pending[0], now) if pending else None,
        pending=len(pending),
        last=_call(calls[-1], now) if calls else None,
        messages=tuple(_call(one, now) for one in messages),
        absent_of=c.waits_op,
        absent=tuple(i for i in range(ranks) if absent[i // 64] >> (i % 64) & 1),
        step_seconds=step_seconds(
            [((_read_text(one.text), int(one.bytes)), one.begin_ns * 1e-9) for one in calls]
        ),
        calls=tuple(_call(one, now) for one in calls) if whole else (),
    )


def _call(c: Any, now: int) -> CallRecord:
    text = _read_text(c.text) or ("recv" if c.receives else "send")
    return data_of(
        CallRecord,
        c,
        text=text,
        began=_ago(now, c.begin_ns),
        ended=_ago(now, c.end_ns),
        failed=bool(c.failed),
    )


def _ago(now: int, at: int) -> float:
    """Seconds before now; -1: never, or before the machine was started again."""
    return (now - at) * 1e-9 if 0 < at <= now else -1.0


def _finite(value: float) -> float:
    return value if 0 <= value < MOST_REAL else 0.0


def _read_text(c: Any) -> str:
    return bytes(ffi.string(c)).decode("utf-8", "replace")

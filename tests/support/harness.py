"""Runs a function on several ranks, each a process of its own, and collects what became of them.

The function is named as "module:function" (of this repository), takes (rank, world) and returns
something that pickles. Ranks are forks of a server that has imported torch: support/forks.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.forks import Process, Server, start_afresh
from tests.support.links import must_use_link

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What one rank did. ``error`` is the exception's type name ("" if none), ``text`` its text.

    ``seconds``: from start to end. ``code``: exit status, negative for a signal.
    """

    rank: int
    value: Any = None
    error: str = ""
    text: str = ""
    code: int | None = None
    seconds: float = 0.0
    stderr: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error} {self.text} (code {self.code})\n{self.stderr}"


class Ranks:
    """Ranks that run; a ``with`` block in which they can be signalled, and that ends them all."""

    def __init__(
        self,
        function: Callable[..., Any] | str,
        world: int,
        env: Mapping[str, str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        per_rank: Mapping[int, Mapping[str, str]] | None = None,
        own_store: bool = False,
        fresh: bool = False,
    ) -> None:
        """``ranks``: the rank of each process, by default each once. ``per_rank``: by process.

        ``own_store``: rank 0 serves the store, as without a launcher. ``fresh``: the processes
        are no forks, so each imports torch for itself and has a seed of hashes of its own.
        """
        name = function if isinstance(function, str) else _name(function)
        self._folder = tempfile.TemporaryDirectory()
        start = start_afresh if fresh else _server().start
        self._start = time.monotonic()
        self.processes: list[Process | subprocess.Popen[bytes]] = []
        self._ranks = list(range(world)) if ranks is None else list(ranks)
        self._ended: dict[int, float] = {}
        self._store = None if own_store else _serve_store()
        port = free_port() if self._store is None else self._store.port
        base = {
            **_inherited(),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # As under torchrun: the store is the launcher's, and outlives any rank.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(world),
            "XDG_RUNTIME_DIR": self._folder.name,  # for status pages, of killed ranks too
            **(env or {}),
        }
        if own_store:
            del base["TORCHELASTIC_USE_AGENT_STORE"]
        for number, rank in enumerate(self._ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **(per_rank or {}).get(number, {})}
            self.processes.append(
                start(
                    "tests.support.harness:be_a_rank",
                    name,
                    str(self._path(number, "out")),
                    env={**base, **own},
                    output=self._path(number, "err"),
                )
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()

    def signal(self, number: int, which: signal.Signals) -> float:
        """Sends a signal to a process; returns time.monotonic() just before it."""
        # Afterwards would be too late: others may have noticed before this process runs again.
        begin = time.monotonic()
        os.kill(self.processes[number].pid, which)
        return begin

    def lose_store(self) -> float:
        """The store's server goes away; returns time.monotonic() just before it."""
        assert self._store is not None
        begin = time.monotonic()
        self._store = None
        return begin

    def wait_for(self, number: int, text: str, timeout: float = 60.0) -> None:
        """Returns when the process has written ``text``; fails after ``timeout`` s."""
        end = time.monotonic() + timeout
        while text not in self.output(number):
            if self.processes[number].poll() is not None:  # it may have written this meanwhile
                assert text in self.output(number), f"ended early:\n{self.output(number)}"
            assert time.monotonic() < end, f"no {text!r} from {number}:\n{self.output(number)}"
            time.sleep(0.02)

    def wait_until_still(self, number: int, timeout: float = 60.0) -> None:
        """Returns when the main thread of the process does nothing but wait."""
        pid = self.processes[number].pid
        stat = Path(f"/proc/{pid}/task/{pid}/stat")
        end = time.monotonic() + timeout
        asleep = 0
        while asleep < 10:
            assert time.monotonic() < end, f"process {number} is still at work"
            state = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.01)

    def output(self, number: int) -> str:
        path = self._path(number, "err")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def collect(self, timeout: float, but: Sequence[int] = ()) -> list[Outcome]:
        """What became of the processes, apart from ``but``; those not done in time are killed."""
        wanted = [n for n in range(len(self.processes)) if n not in but]
        end = self._start + timeout
        while time.monotonic() < end:
            for number in wanted:
                if number not in self._ended and self.processes[number].poll() is not None:
                    self._ended[number] = time.monotonic()
            if all(number in self._ended for number in wanted):
                break
            time.sleep(0.01)
        return [self._outcome(number) for number in wanted]

    def _outcome(self, number: int) -> Outcome:
        process = self.processes[number]
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)  # faulthandler writes where it hangs
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        out = Outcome(self._ranks[number], code=process.returncode, stderr=self.output(number))
        out.seconds = self._ended.get(number, float("inf")) - self._start
        path = self._path(number, "out")
        if path.exists():
            out.value, out.error, out.text = pickle.loads(path.read_bytes())
        elif number not in self._ended:
            out.error = "Hang"
        return out

    def _path(self, number: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{number}.{kind}"


def run_ranks(
    function: Callable[..., Any] | str,
    world: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **rest: Any,
) -> list[Outcome]:
    """Runs ``function`` on ``world`` ranks to their end; ``rest`` as for :class:`Ranks`."""
    with Ranks(function, world, env, **rest) as ranks:
        return ranks.collect(timeout)


def run_good(
    function: Callable[..., Any] | str,
    world: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **rest: Any,
) -> list[Any]:
    """The values by rank, of ranks that must all end well: no exception, exit status 0."""
    outcomes = run_ranks(function, world, env, timeout, **rest)
    # All of the bad ones: the first is often but the victim of another.
    bad = [str(outcome) for outcome in outcomes if outcome.error or outcome.code != 0]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in outcomes]


def _serve_store() -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    """A TCP port that was free a moment ago, and that the kernel gives nobody by itself.

    Those that it gives start at 32768, and tests that run beside this one take many of them.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def init(timeout: float = 60.0, **rest: Any) -> None:
    """init_process_group as a test's rank does it, over the link that the test has chosen."""
    import torch.distributed as dist

    dist.init_process_group(**{"backend": "lossy", "timeout": timedelta(seconds=timeout), **rest})
    must_use_link()


EXACT = {"LOSSYCOLL_REORDER_MIN": "0.5", "LOSSYCOLL_DEADLINE_MIN": "5"}
"""Packets that a busy machine delivers late are no loss: so what lossy calls add up is exact."""


def await_ranks(what: str, ranks: Iterable[int]) -> None:
    """Returns when all of ``ranks`` have set the store's key ``what``/rank."""
    from torch.distributed.distributed_c10d import _get_default_store

    _get_default_store().wait([f"{what}/{rank}" for rank in ranks])


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(victim: int) -> None:
    """Rank ``victim`` kills itself once all ranks are here; the others go on.

    A barrier would not do: what others still need of it can die with the rank that left it first.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store, world = _get_default_store(), dist.get_world_size()
    store.set(f"here/{dist.get_rank()}", "")
    if dist.get_rank() == victim:
        await_ranks("here", range(world))
        kill_self()


def note(text: str) -> None:
    """Tells the parent, which waits for it with :meth:`Ranks.wait_for`."""
    print(text, flush=True)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def warm_python() -> str:
    """An interpreter that has torch imported already, as a path to start it by: support/warm.py."""
    return _server().python


@functools.cache
def _server() -> Server:
    return Server(_inherited())


def _inherited() -> dict[str, str]:
    """What every rank finds in its environment, and what torch was imported with."""
    # Not at the top: ranks import this module, and some tests ask what they have imported.
    from lossycoll.options.texts import SECRET_VARIABLES

    return {
        # With a secret, ranks of all tests seal what they send.
        **{
            k: v
            for k, v in os.environ.items()
            if not k.startswith("LOSSYCOLL_") or k in SECRET_VARIABLES
        },
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # What is installed beside the interpreter's own folders is named there.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONFAULTHANDLER": "1",
    }


def is_sealed() -> bool:
    """Whether this rank's job has a secret: what gloo serves is refused then."""
    from lossycoll.runtime.keys.secret import find_secret

    return find_secret() is not None


def be_a_rank(function: str, out: str) -> None:
    """What a rank's process does; ``out``: the file for its outcome."""
    module, _, name = function.partition(":")
    path = Path(out)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    value: Any = None
    error = text = ""
    # Shells have what they start in the background ignore it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        __import__(module)
        value = getattr(sys.modules[module], name)(rank, world)
    except BaseException as caught:
        traceback.print_exc()
        error, text = type(caught).__name__, str(caught)
    path.with_suffix(".tmp").write_bytes(pickle.dumps((value, error, text)))
    path.with_suffix(".tmp").rename(path)
    if error:
        sys.exit(1)

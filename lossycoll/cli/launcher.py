"""Starts the ranks of a job on this machine through torchrun's own API.

A rank is ``python -m MODULE CONFIG``, as torchrun would start it. Rank 0 reports
its progress by appending JSON lines to a file: that needs no second channel between
processes, and survives a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answer import EXIT_INTERRUPTED, CommandError

if TYPE_CHECKING:
    from rich.console import Console

RESULT = "ranks.json"
HOST_SECONDS = 900.0
"""Longest job on hosts of a laboratory."""
POLL_SECONDS = 0.1
LOG_TAIL_LINES = 15


class LaunchError(CommandError):
    """A rank failed; the text ends with what it wrote last."""


class Interrupted(CommandError):
    """The user or the system asked the job to stop; its ranks are gone."""

    status = EXIT_INTERRUPTED


@contextlib.contextmanager
def progress(
    console: Console, label: str, total: int
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar that shows how far ranks are, and takes their events: ``done``, and a ``note``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:<20}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as shown:
        task = shown.add_task(label, total=total, note="starting ranks")
        yield lambda event: shown.update(task, completed=event["done"], note=event["note"])


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder. It stays when a rank fails: the error points to the logs in it."""
    folder, is_kept = tempfile.mkdtemp(prefix=prefix), False
    try:
        yield Path(folder)
    except LaunchError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


class EventWriter:
    """A rank's side: one JSON object per line."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (closed in close)

    def write(self, **event: object) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def launch(
    module: str,
    config: Mapping[str, object],
    *,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str | None],
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    lab: Any = None,
) -> Any:
    """Runs ``module`` on ``ranks`` ranks until all of them have ended well, and returns what rank 0
    has written to ranks.json beside its configuration; None: nothing.

    ``folder`` receives the configuration, the events and each rank's output. A value of None in
    ``environment`` takes that variable away from the ranks. ``lab``: a Lab, on whose hosts they are
    (without its type, by which the package would import itself in a circle).
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, events, file = (folder / name for name in (RESULT, "events.jsonl", "config.json"))
    result.unlink(missing_ok=True)
    events.write_text("", encoding="utf-8")
    file.write_text(json.dumps({**config, "events": str(events)}), encoding="utf-8")
    command = [sys.executable, "-u", "-m", module, str(file)]
    with _follow(events, on_event):
        if lab is None:
            run_ranks(command, ranks=ranks, folder=folder, environment=environment)
        else:
            _run_on_hosts(lab, command, environment)
    return json.loads(result.read_text(encoding="utf-8")) if result.exists() else None


def _run_on_hosts(lab: Any, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
    # A host has one interface, and the laboratory names it.
    own = {name: v for name, v in on_one_machine().items() if name != "GLOO_SOCKET_IFNAME"}
    for rank in lab.run(command, {**own, **environment}, timeout=HOST_SECONDS):
        if rank.code:
            text = f"rank {rank.rank} failed in the laboratory with exit code {rank.code}"
            raise LaunchError(_with_last_lines(text, rank.output))


def run_ranks(
    command: Sequence[str], *, ranks: int, folder: Path, environment: Mapping[str, str | None]
) -> None:
    """Runs ``command`` on ``ranks`` ranks, as torchrun would, until all of them have ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs, run = folder / "logs", uuid.uuid4().hex
    logs.mkdir(exist_ok=True)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # A host whose own name does not resolve must still be able to talk to itself.
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    with _environment(on_one_machine() | dict(environment)):
        try:
            elastic_launch(settings, command[0])(*command[1:])
        except ChildFailedError as error:
            # torchrun names the folder of a run after it; earlier runs have left theirs.
            own = next(logs.glob(f"{run}*"), logs)
            raise LaunchError(_explain(error.failures, own)) from error
        except (SignalException, KeyboardInterrupt) as error:
            raise Interrupted("stopped; all ranks have been ended") from error


def on_one_machine() -> dict[str, str | None]:
    """Environment variables that ranks on one machine need, unless the user has said otherwise."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if Path("/sys/class/net/lo").exists():
        # gloo otherwise binds to whatever the host's name resolves to, which may be nothing.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The ranks inherit this process's environment, so it is changed for a while."""
    before = dict(os.environ)
    try:
        for name, value in changes.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changes.keys() & before.keys()})


@contextlib.contextmanager
def _follow(path: Path, on_event: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hands every line that is appended to ``path`` to ``on_event``, until the block ends."""
    ended = threading.Event()

    def read() -> None:
        with path.open(encoding="utf-8") as lines:
            kept = ""
            while True:
                last_round = ended.is_set()
                *whole, kept = (kept + lines.read()).split("\n")
                for line in whole:
                    on_event(json.loads(line))
                if last_round:
                    return
                ended.wait(POLL_SECONDS)

    reader = threading.Thread(target=read, name="lossycoll-events", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


def _explain(failures: Mapping[int, Any], logs: Path) -> str:
    """The failure that came first is the cause; the others follow from it."""
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    said = (path.read_text("utf-8", "replace") for path in logs.rglob(f"{rank}/stderr.log"))
    text = f"rank {rank} failed with exit code {first.exitcode}; its output is under {logs}"
    return _with_last_lines(text, "".join(said))


def _with_last_lines(text: str, output: str) -> str:
    """A text, and what tells why a rank failed. Behind that Triton's bindings may list leaks."""
    said, _, _ = output.partition("nanobind: leaked")
    return "\n".join([text, *(f"  {line}" for line in said.splitlines()[-LOG_TAIL_LINES:])])

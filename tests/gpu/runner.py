"""Runs a table of checks on ranks that are started once, and tells what became of each.

A check that fails ends the group on all ranks, and the next one begins with a new one. A check that
hangs, or ends its process, is the end of the ranks: they are started again for those that are left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gpu.checks import Check, Rank, Table, table_of
from tests.support import fake_device
from tests.support.harness import Outcome, Ranks, init, note
from tests.support.versions import name_as_today

GROUP_SECONDS = 15.0
"""The group's timeout: less than the limit of a check, so that a rank left alone ends by itself."""
GRACE_SECONDS = 4.0
"""How long ranks may go on when one has ended."""
STARTS = 5
"""How often ranks are started for one table at most."""
MOST_SECONDS = 280.0
TAIL = 6000
SAMPLE = (
    "all_reduce",
    "broadcast",
    "in_pieces",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "uneven_all_gather",
    "coalesced",
    "sparse",
    "point_to_point",
    "blocks",
)
"""Of collectives, what the short suite checks without a GPU."""
FAKE = "GPU_FAKE"
"""Of ranks on the CPU: how waits on a fake device end, "stream" or "host"; not set: no device."""
_MODULE, _NAMES, _DEVICE = "GPU_TABLE", "GPU_NAMES", "GPU_DEVICE"
_BEGAN, _ENDED = "BEGAN ", "ENDED "


@dataclass
class Found:
    """What became of a check: by rank the text of its error, empty if it passed."""

    errors: dict[int, str]
    seconds: float = 0.0
    skipped: str = ""

    def must_pass(self) -> None:
        if self.skipped:
            pytest.skip(self.skipped)
        bad = [f"rank {rank}: {text}" for rank, text in sorted(self.errors.items()) if text]
        assert not bad, "\n".join(bad)


@dataclass
class _Ending:
    """How a check ended at one rank."""

    error: str
    seconds: float
    skipped: str


def run_table(
    module: str,
    *,
    device: str = "cuda:0",
    world: int = 2,
    env: Mapping[str, str] | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, Found]:
    """Runs the checks called ``names`` (None: all) of a module's TABLE.

    Returns what became of each, in their order; ``env`` is of the ranks.
    """
    table = table_of(module)
    todo = list(table.checks if names is None else names)
    found: dict[str, Found] = {}
    if device == "cpu":
        for name in [name for name in todo if table.checks[name].cuda]:
            found[name] = Found({}, skipped="is about CUDA's own")
    end = time.monotonic() + MOST_SECONDS
    for _ in range(STARTS):
        left = [name for name in todo if name not in found]
        seconds = end - time.monotonic()
        if not left or seconds < 10:
            break
        given = {_MODULE: module, _NAMES: json.dumps(left), _DEVICE: device, **(env or {})}
        # A process that forks must not have initialized CUDA, so on a GPU ranks start afresh.
        found |= _read(_outcomes(world, given, seconds, fresh=device != "cpu"))
    for name in todo:
        found.setdefault(name, Found({0: "not run: ranks ended too often, or took too long"}))
    return {name: found[name] for name in todo}


def _outcomes(world: int, env: Mapping[str, str], seconds: float, fresh: bool) -> list[Outcome]:
    """Of ranks that end together: once one has, the others are given little time."""
    begin = time.monotonic()
    with Ranks(rank_checks, world, env, fresh=fresh) as ranks:
        while time.monotonic() < begin + seconds:
            if any(process.poll() is not None for process in ranks.processes):
                seconds = min(seconds, time.monotonic() - begin + GRACE_SECONDS)
                break
            time.sleep(0.02)
        return ranks.collect(seconds)


def _read(outcomes: list[Outcome]) -> dict[str, Found]:
    """What the ranks have written; a check that not all have ended is one that failed."""
    began: dict[str, None] = {}
    ended: dict[str, dict[int, _Ending]] = {}
    for outcome in outcomes:
        for line in outcome.stderr.splitlines():
            if line.startswith(_BEGAN):
                began[line.removeprefix(_BEGAN)] = None
            elif line.startswith(_ENDED):
                name, *ending = json.loads(line.removeprefix(_ENDED))
                ended.setdefault(name, {})[outcome.rank] = _Ending(*ending)
    found = {}
    for name in began:
        by_rank = ended.get(name, {})
        errors = {rank: ending.error for rank, ending in by_rank.items()}
        for outcome in outcomes:
            if outcome.rank not in by_rank:
                how = f"{outcome.error} {outcome.text}".strip()
                errors[outcome.rank] = (
                    f"ended in this check, or before it (status {outcome.code}) {how}\n"
                    f"{outcome.stderr[-TAIL:]}"
                )
        seconds = max((ending.seconds for ending in by_rank.values()), default=0.0)
        reasons = {ending.skipped for ending in by_rank.values()}
        # One rank alone can't leave out a check.
        skipped = reasons.pop() if len(reasons) == 1 and not any(errors.values()) else ""
        found[name] = Found(errors, seconds, skipped)
    if not found:  # nothing has begun: the next start would do no better
        text = "\n".join(f"{outcome}"[-TAIL:] for outcome in outcomes)
        raise RuntimeError(f"no check has begun:\n{text}")
    return found


# ---- in a rank ----


def rank_checks(rank: int, world: int) -> None:
    """Runs the checks that the environment names."""
    import warnings

    import torch

    from lossycoll import _autoload

    warnings.simplefilter("ignore", FutureWarning)
    name_as_today()
    _autoload.register()  # where the package is only on the path
    device = os.environ[_DEVICE]
    if fake := os.environ.get(FAKE):
        fake_device.install(waits_by_stream=fake == "stream", seed=rank)
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # so that no check is charged for making the context
    module = os.environ[_MODULE]
    table = table_of(module)
    meeting = _Meeting(rank, world)
    for name in json.loads(os.environ[_NAMES]):
        note(f"{_BEGAN}{name}")
        begin = time.monotonic()
        error, skipped = _run(table, table.checks[name], Rank(rank, world, device))
        seconds = round(time.monotonic() - begin, 3)
        note(_ENDED + json.dumps([name, error[-TAIL:], seconds, skipped]))
        if not meeting.all_passed(not error):
            with _limited(GROUP_SECONDS):
                _end_group()
    with _limited(GROUP_SECONDS):
        _end_group()


def _run(table: Table, check: Check, rank: Rank) -> tuple[str, str]:
    """The error's text, if it fails, and why it is left out, if it says so.

    After an error the group has ended, so that no other rank waits.
    """
    import torch.distributed as dist

    with _limited(check.limit):
        try:
            if not dist.is_initialized():
                init(timeout=GROUP_SECONDS, **table.init)
            check.run(rank)
            rank.wait_for_device()
        except pytest.skip.Exception as skip:
            return "", str(skip)
        except (Exception, pytest.fail.Exception):
            text = traceback.format_exc()
            with contextlib.suppress(Exception):
                dist.group.WORLD.abort()  # type: ignore[union-attr]
            return text, ""
    return "", ""


def _end_group() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _limited(seconds: float) -> Any:
    """Ends the process after so long, whatever it is stuck in, with where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Meeting:
    """Ranks tell one another how a check ended, by the launcher's store."""

    def __init__(self, rank: int, world: int) -> None:
        from torch.distributed import TCPStore

        self._place = (rank, world)
        self._count = 0
        self._store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )

    def all_passed(self, passed: bool) -> bool:
        """Waits for all ranks; raises if one ends, or hangs for longer than any check may."""
        from datetime import timedelta

        rank, world = self._place
        self._count += 1
        # A second start of ranks has a store of its own.
        keys = [f"check {self._count}/{one}" for one in range(world)]
        self._store.set(keys[rank], "1" if passed else "0")
        self._store.wait(keys, timedelta(seconds=3 * harness_limit()))
        return all(self._store.get(key) == b"1" for key in keys)


def harness_limit() -> float:
    """The longest that a check of this table may take."""
    return max(check.limit for check in table_of(os.environ[_MODULE]).checks.values())

"""Forked ranks end as interpreters of their own would."""

from __future__ import annotations

import atexit
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.harness import init, note, run_ranks, warm_python


class Noted:
    """Says when it is deleted."""

    def __del__(self) -> None:
        print("finalized", flush=True)


KEPT: list[Noted] = []


def rank_ends_clean(rank: int, world: int) -> None:
    import torch.distributed as dist

    init()
    dist.destroy_process_group()
    KEPT.append(Noted())
    atexit.register(print, "at exit", end="")


def rank_leaves_its_group(rank: int, world: int) -> None:
    init()
    rank_keeps_one(rank, world)


def rank_leaves_a_thread(rank: int, world: int) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    rank_keeps_one(rank, world)


def rank_fails(rank: int, world: int) -> None:
    rank_keeps_one(rank, world)
    raise ValueError("on purpose")


def rank_keeps_one(rank: int, world: int) -> None:
    KEPT.append(Noted())
    note("done")


@pytest.mark.parametrize("function", [rank_leaves_its_group, rank_leaves_a_thread, rank_fails])
def test_what_a_rank_leaves_is_finalized(function: Callable[[int, int], None]) -> None:
    (outcome,) = run_ranks(function, 1)
    assert outcome.code == (function is rank_fails)
    assert "finalized\n" in outcome.stderr, outcome


def test_nothing_is_finalized_where_nothing_is_left() -> None:
    (outcome,) = run_ranks(rank_ends_clean, 1)
    assert outcome.code == 0
    assert outcome.stderr == "at exit"


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3)]
)
def test_a_warm_interpreter_ends_with_its_status(end: str, code: int, tmp_path: Path) -> None:
    script = f"import sys\nsys.stdout.write('said')\n{end}"
    done = subprocess.run(
        [warm_python(), "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (code, "said")

"""A benchmark's ranks on the hosts of a laboratory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT
from lossycoll.errors import LossyError
from lossycoll.lab import Lab


class JobTimeout(LossyError):
    """A job was ended since it took too long."""


def answer(found: Any) -> None:
    """In a rank: what :func:`run_job` returns of it."""
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")


def run_job(
    lab: Lab,
    module: str,
    config: Mapping[str, Any],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    *,
    out: Path | None = None,
    on_line: Callable[[int, str], None] = lambda rank, line: None,
) -> list[Any]:
    """Runs ``python -m module CONFIG OUT`` as every rank, one thread each, CONFIG as JSON. Returns
    the answers of the ranks that gave one.

    ``out``: begins the names of what ranks write; by default of files that are gone afterwards.
    ``on_line`` is given (rank, line) as ranks write them.

    Raises LossyError with what ranks wrote when one fails, JobTimeout when they take longer than
    ``seconds``.
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out"
            return run_job(lab, module, config, seconds, environment, out=path, on_line=on_line)
    written: defaultdict[int, list[str]] = defaultdict(list)

    def take(rank: int, line: str) -> None:
        written[rank].append(line)
        on_line(rank, line)

    began = time.monotonic()
    ended = lab.run(
        [sys.executable, "-m", module, json.dumps(config), str(out)],
        {
            "OMP_NUM_THREADS": "1",
            "LOSSYCOLL_LOG": "warning",
            "LOSSYCOLL_LIVENESS": "60",  # all ranks and their network share this machine's cores
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        },
        timeout=seconds,
        on_line=take,
    )
    # All of the bad ones: the first is often but the victim of another.
    bad = [
        f"rank {one.rank}, status {one.code}:\n" + "".join(written[one.rank])
        for one in ended
        if one.code
    ]
    if bad:
        late = time.monotonic() - began >= seconds
        why = f"not done in {seconds:g} s" if late else "ranks failed"
        raise (JobTimeout if late else LossyError)(f"{module}: {why}\n" + "\n".join(bad))
    answers = [Path(f"{out}.{one.rank}") for one in ended]
    return [json.loads(path.read_text(encoding="utf-8")) for path in answers if path.exists()]

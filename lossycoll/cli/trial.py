"""Run your own training script at several losses, and compare the metric that it prints.

lossycoll try --loss 0,0.01,0.05 --metric loss -- python train.py
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options

from .answer import EXIT_FAILED, Answer, add_json, give, must_be_writable, numbers_table
from .argtypes import inject_text, real, shares, whole
from .launcher import LaunchError, run_ranks, scratch

NOT_FINITE: Final = r"(?i:nan|inf(?:inity)?)"
NUMBER: Final = rf"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|{NOT_FINITE})"
ENDS: Final = r"(?!\w|\.\w|,\d)"
"""End of a number; without it 0.53s would be 0.5."""
QUOTE: Final = r"\\?[\"']?"
WRAPPED: Final = rf"(?:(?:tensor|np\.\w+)\()?{QUOTE}"
"""Wrappers of a number: tensor(0.5), np.float64(0.5), '0.5'."""
SHOWN: Final = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x08")
"""Colours and movements of a terminal's cursor."""


@dataclass(frozen=True)
class Trial:
    """One run of the script."""

    loss: float  # share of packets that were dropped
    seed: int  # of what was dropped
    value: float | None  # the metric's last value at rank 0; None where it printed none
    # how many groups of the backend "lossy" with a socket of their own rank 0 made. Without one
    # nothing is lost
    groups: int
    dropped: int | None  # by injection, over all ranks; None where no group reported it
    seconds: float  # from the start of the ranks to their end
    failure: str = ""  # what ended the run; empty if it ended well
    unread: str = ""  # what stands behind the metric's last mention where that is no number

    @property
    def lossless(self) -> bool:
        """True if a run that was to lose packets lost none."""
        return self.loss > 0 and self.dropped == 0 and not self.failure

    def as_json(self) -> dict[str, Any]:
        """For JSON, which has neither NaN nor infinity: null stands for them."""
        is_finite = self.value is not None and math.isfinite(self.value)
        return {**asdict(self), "value": self.value if is_finite else None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    how = "shares of packets to drop, in rising order (default %(default)s)"
    add("--loss", type=shares, default="0,0.01,0.05", dest="losses", help=how)
    add("--burst", type=real(1), default=1.0, help="mean length of a loss, in packets (default 1)")
    add("--seeds", type=whole(1, 1000), default=1, help="runs for each loss (default 1)")
    add("--ranks", type=whole(2, 64), default=2, help="processes (default 2)")
    how = (
        "rank 0 prints NAME=VALUE, NAME: VALUE or NAME VALUE, in a line, a dict, JSON or a "
        "table; the last counts (default loss)"
    )
    add("--metric", default="loss", metavar="NAME", help=how)
    add_json(parser)
    add("--out", type=Path, help="also write the JSON to this file")
    add("unseparated", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(chosen: argparse.Namespace) -> int:
    """``chosen.words``: the command after "--"."""
    _check_command(chosen.words, chosen.unseparated)
    chosen.metric = chosen.metric.strip()
    if not chosen.metric:
        raise OptionError("the metric needs a name")
    for loss in chosen.losses:
        Options(inject=inject_text(loss, chosen.burst, 1) or "")
    must_be_writable(chosen.out)
    errors = Console(stderr=True)
    trials = []
    for loss in chosen.losses:
        for seed in range(1, chosen.seeds + 1):
            errors.print(f"loss {loss:g}, seed {seed}", highlight=False)
            trials.append(trial(chosen, loss, seed))
    for complaint in complaints(trials, chosen.metric):
        errors.print(f"lossycoll try: {complaint}", highlight=False, markup=False)
    bad = any(one.failure or one.value is None or one.lossless for one in trials)
    data = {"metric": chosen.metric, "trials": [one.as_json() for one in trials]}
    shown = [table(trials, chosen.metric)]
    return give(Answer(data, shown, status=EXIT_FAILED if bad else 0), chosen, file=chosen.out)


def _check_command(words: Sequence[str] | None, unseparated: Sequence[str]) -> None:
    if unseparated:
        raise OptionError(f"write -- before the command, as in -- {' '.join(unseparated)}")
    if not words:
        raise OptionError("nothing to run; write a command after --, as in -- python train.py")
    if shutil.which(words[0]) is None:
        raise OptionError(
            f"there is no program {words[0]!r} to run; a script takes its python before it"
        )


def trial(chosen: argparse.Namespace, loss: float, seed: int) -> Trial:
    """Runs the command once, on all ranks. A run that fails is a result as well."""
    environment = {
        "LOSSYCOLL_INJECT": inject_text(loss, chosen.burst, seed),
        "LOSSYCOLL_LOG": "info",  # by which groups and dropped packets are counted
    }
    failure = out = err = everywhere = ""
    started = time.monotonic()
    try:
        with scratch("lossycoll-try-") as folder:
            try:
                run_ranks(chosen.words, ranks=chosen.ranks, folder=folder, environment=environment)
            finally:
                out, err = _written(folder, "0/stdout"), _written(folder, "0/stderr")
                everywhere = _written(folder, "*/stderr")
    except LaunchError as error:
        failure = str(error)
    found = mentions(out, chosen.metric) or mentions(err, chosen.metric)
    value, unread = found[-1] if found else (None, "")
    dropped = [int(n) for n in re.findall(r"event=left\b.*\bpackets_injected=(\d+)", everywhere)]
    return Trial(
        loss,
        seed,
        value=value,
        groups=len(re.findall(r"event=ready\b", err)),
        dropped=sum(dropped) if dropped else None,
        seconds=round(time.monotonic() - started, 1),
        failure=failure,
        unread=unread,
    )


def _written(folder: Path, name: str) -> str:
    """All logs of this name, a rank's or, with ``*``, every rank's."""
    files = sorted(folder.rglob(f"{name}.log"))
    return "\n".join(one.read_text(encoding="utf-8", errors="replace") for one in files)


def mentions(text: str, metric: str) -> list[tuple[float | None, str]]:
    """Each place where ``text`` gives a value to ``metric``: the number, or what stands there.

    ``loss=0.5``, ``loss: 0.5``, ``last loss 0.5``, ``{'loss': '0.5'}`` and a table's
    ``| loss | 0.5 |`` all say that "loss" is 0.5.
    """
    name = rf"(?<![\w.-]){QUOTE}{re.escape(metric)}{QUOTE}"
    # A word behind a blank or in a table is prose; behind = or : it was meant as the value.
    value = rf"(?:\s+|\s*[|│┃]\s*)(?=[-+]?(?:\.?\d|{NOT_FINITE}\b))"
    number = rf"{WRAPPED}({NUMBER}){ENDS}"
    said = SHOWN.sub("", text)
    found = re.finditer(rf"{name}(?:\s*[=:]\s*|{value})(?:{number}|(\S*))", said)
    return [(float(one[1]), "") if one[1] else (None, one[2]) for one in found]


def values_by_loss(trials: Sequence[Trial]) -> dict[float, list[float]]:
    """The metric of the runs at each loss, rising, that ended well and have one."""
    found: dict[float, list[float]] = {loss: [] for loss in sorted({one.loss for one in trials})}
    for one in trials:
        if one.value is not None and not one.failure:
            found[one.loss].append(one.value)
    return found


def table(trials: Sequence[Trial], metric: str) -> Table:
    """A row per loss: the metric's mean and range, and how far it is from the first row's."""
    rows = values_by_loss(trials)
    first = next(iter(rows))
    out = numbers_table("dropped", metric, "from", "to", f"against {first:g}", "s", "failed")
    base = statistics.fmean(rows[first]) if rows[first] else None
    for loss, values in rows.items():
        change, shown = "-", ["-"] * 3
        if values:
            mean = statistics.fmean(values)
            shown = [f"{value:.6g}" for value in (mean, min(values), max(values))]
            if base and loss != first:
                change = f"{(mean - base) / abs(base):+.2%}"
        seconds = [one.seconds for one in trials if one.loss == loss]
        failed = str(len(seconds) - len(values) or "")
        out.add_row(f"{loss:g}", *shown, change, f"{statistics.fmean(seconds):.1f}", failed)
    return out


def complaints(trials: Sequence[Trial], metric: str) -> list[str]:
    """Complaints about what makes the table worth less than it seems."""
    failed = [one for one in trials if one.failure]
    # One is enough to read: what ends one run mostly ends the others as well.
    out = [f"loss {one.loss:g}, seed {one.seed}: {one.failure}" for one in failed[:1]]
    silent = [one for one in trials if one.value is None and not one.failure]
    unread = [one.unread for one in silent if one.unread]
    if unread:
        out.append(
            f"behind the last {metric} stands {unread[0]!r}, wanted a number, as in {metric}=0.5"
        )
    elif silent:
        out.append(
            f"rank 0 printed no {metric}=VALUE; print it at the end, or choose another name by "
            f"--metric"
        )
    if any(one.loss > 0 and not one.groups and not one.failure for one in trials):
        out.append(
            "rank 0 made no group of the backend lossy that says so, so perhaps nothing was lost: "
            'does the script call init_process_group("lossy")?'
        )
    if any(one.lossless for one in trials):
        out.append(
            "no packet was dropped, so the table shows nothing of loss: does the script send few "
            "packets, or its gradients by another group?"
        )
    return out

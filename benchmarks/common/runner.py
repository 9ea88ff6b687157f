"""The one way to run a study: what is done isn't run again, and it can be stopped at any time.

A study is data (:class:`Study`): the pieces that it wants, how one is measured, and what is
reported of the results there are. ``python -m benchmarks NAME`` hands it to :func:`main`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from rich.console import Console

from benchmarks.common.results import STUDIES, Piece, Result, append, commit, load, machine, today
from lossycoll.cli.launcher import LaunchError
from lossycoll.errors import LossyError

P = TypeVar("P", bound=Piece)
T = TypeVar("T")
Options: TypeAlias = argparse.Namespace
Measure: TypeAlias = Callable[[Sequence[P]], Sequence[Any]]
"""Takes a batch of pieces, returns the figures of each."""


class PieceFailed(RuntimeError):
    """A piece could not be measured; the text says why."""


def one_by_one(
    function: Callable[[P, Options], Any],
) -> Callable[[Options], AbstractContextManager[Measure[P]]]:
    """For studies whose pieces have nothing in common."""
    return lambda options: nullcontext(lambda batch: [function(piece, options) for piece in batch])


def batch_by_batch(
    function: Callable[[Sequence[P], Options], Sequence[Any]],
) -> Callable[[Options], AbstractContextManager[Measure[P]]]:
    """For studies that measure several pieces in one job."""
    return lambda options: nullcontext(lambda batch: function(batch, options))


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _keys(pieces: Sequence[P], options: Options) -> Iterable[str]:
    del options
    return (piece.key for piece in pieces)


def _each(pieces: Sequence[P]) -> Iterable[Sequence[P]]:
    return ([piece] for piece in pieces)


@dataclass(frozen=True)
class Study(Generic[P]):
    """What :func:`main` needs to know of a study."""

    name: str  # its folder in benchmarks/studies
    description: str  # for ``--help``
    # the pieces that options ask for, the most important first. Raises ValueError for options that
    # make no sense
    plan: Callable[[Options], Sequence[P]]
    # A context within which batches are measured. Measuring raises PieceFailed, LossyError or
    # LaunchError for a piece that fails
    measuring: Callable[[Options], AbstractContextManager[Measure[P]]]
    # writes what can be said of results into a folder; may return a text to print. Raises
    # ValueError where results make no sense. None: ``write`` of the study's report.py
    report: Callable[[Sequence[Result], Path], str | None] | None = None
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments  # adds options of its own
    # which pieces are measured together
    batches: Callable[[Sequence[P]], Iterable[Sequence[P]]] = _each
    # pieces with the same take about as long, for the time that is left
    alike: Callable[[P], object] = lambda piece: ""
    failures_allowed: int = 1  # so many failures end the run
    # only planned pieces are reported, as those of another budget can't be compared; else all that
    # there are
    reports_planned: bool = False
    # what the folder of the report must have
    report_help: str = "folder for tables and plots, such as docs"
    # what ``--dry-run`` says of pieces, in lines. Raises LaunchError where they can't be measured
    # here
    preview: Callable[[Sequence[P], Options], Iterable[str]] = _keys


def main(study: Study[P], arguments: Sequence[str] | None = None) -> int:
    """Runs what isn't done, then writes the report; returns the exit status."""
    parser = _parser(study)
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        planned = list(study.plan(options))
        wanted = only(planned, options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.dry_run:
        return say(study.preview(wanted, options), console)
    status = 0 if options.report_only else run(study, wanted, options, console)
    if status or not options.report:
        return status
    done = load(options.results)
    kept = [done[piece.key] for piece in planned if piece.key in done]
    module = f"benchmarks.studies.{study.name.replace('/', '.')}.report"
    report = study.report or import_module(module).write
    try:
        text = report(kept if study.reports_planned else list(done.values()), options.report)
    except ValueError as error:
        console.print(str(error), markup=False)
        return 1
    print(text or f"tables and plots: {options.report}")
    return 0


def say(lines: Iterable[str], console: Console) -> int:
    """Prints a preview; returns the exit status."""
    try:
        for line in lines:
            print(line, flush=True)
    except LaunchError as error:
        console.print(str(error), markup=False)
        return 1
    return 0


def _parser(study: Study[P]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {study.name}",
        description=study.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    results = STUDIES / study.name / "results.jsonl"
    add("--results", type=Path, default=results, help="where results are appended")
    add("--report", type=Path, help=study.report_help)
    add("--report-only", action="store_true", help="run nothing")
    add("--dry-run", action="store_true", help="say what would be run, and what it lacks")
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="pieces whose setting is one of these; may be repeated",
    )
    add("--limit-minutes", type=float, default=0, help="start no more after so long (no limit)")
    add("--again", action="store_true", help="run what is done, too; the later result counts")
    study.arguments(parser)
    return parser


def only(pieces: Sequence[P], words: Sequence[str]) -> list[P]:
    """The pieces that fit every word, as in ``loss=0.1,0.2``."""
    out = list(pieces)
    for word in words:
        name, equals, text = word.partition("=")
        settings = pieces[0].settings if pieces else {}
        if not equals or name not in settings:
            known = ", ".join(settings)
            raise ValueError(f"{word!r}: wanted NAME=VALUE[,VALUE...], NAME one of {known}")
        known_values = {f"{piece.settings[name]}" for piece in pieces}
        values = [text] if text in known_values else text.split(",")  # a name may have commas
        for value in values:
            if value not in known_values:
                raise ValueError(f"{word!r}: {name} is one of {', '.join(sorted(known_values))}")
        out = [piece for piece in out if f"{piece.settings[name]}" in values]
    return out


def in_time(batches: Iterable[T], minutes: float) -> Iterator[T]:
    """``batches`` until so many minutes have passed, none of which is begun later; 0: all."""
    begin = time.monotonic()
    for batch in batches:
        if minutes and time.monotonic() - begin > 60 * minutes:
            return
        yield batch


def run(study: Study[P], wanted: Sequence[P], options: Options, console: Console) -> int:
    """Measures what the results don't have yet; returns the exit status."""
    done = {} if options.again else load(options.results)
    left = [piece for piece in wanted if piece.key not in done]
    console.print(f"{len(wanted)} pieces, {len(left)} to do", markup=False)
    code = commit(f"benchmarks/studies/{study.name}")
    clock = _Clock(study, left)
    failures = 0
    with study.measuring(options) as measure:
        for batch in in_time(study.batches(left), options.limit_minutes):
            begin = time.monotonic()
            try:
                found = measure(batch)
            except (PieceFailed, LossyError, LaunchError) as error:
                failures += 1
                console.print(f"{batch[0].key}: {error}", markup=False)
                if failures >= study.failures_allowed:
                    if study.failures_allowed > 1:
                        console.print(f"{failures} pieces have failed; the others are not tried")
                    return 1
                continue
            for piece, figures in zip(batch, found, strict=True):
                append(options.results, Result(piece.settings, figures, today(), code, machine()))
            spent = time.monotonic() - begin
            clock.note(batch, spent)
            console.print(f"{batch[0].key}: {spent:.0f} s; {clock.left()}", markup=False)
    return 1 if failures else 0


class _Clock(Generic[P]):
    """How long what is left takes, from pieces of the same kind, or of any where there is none."""

    def __init__(self, study: Study[P], pieces: Sequence[P]) -> None:
        self._alike = study.alike
        self._left = {piece.key: study.alike(piece) for piece in pieces}
        self._spent: dict[object, list[float]] = {}

    def note(self, batch: Sequence[P], seconds: float) -> None:
        for piece in batch:
            self._spent.setdefault(self._alike(piece), []).append(seconds / len(batch))
            self._left.pop(piece.key)

    def left(self) -> str:
        every = [seconds for spent in self._spent.values() for seconds in spent]
        total = 0.0
        for kind in self._left.values():
            spent = self._spent.get(kind, every)
            total += sum(spent) / len(spent)
        return f"{total / 60:.0f} min left"

"""Make a page of a job's figures over time: loss, rates, step time and drift, by rank and link."""

from __future__ import annotations

import argparse
import heapq
import html
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Console

from lossycoll.runtime.world.job_status import ALIVE, in_words

from .answer import CommandError, must_be_writable, pyplot, save
from .status import BAD_LOSS, NOT_THERE

Points: TypeAlias = list[tuple[float, float]]
Series: TypeAlias = dict[str, Points]
History: TypeAlias = list[tuple[float, Mapping[str, Any]]]
"""What a rank has told, and when. Times are seconds since the job's first line."""
MOST_LINES: Final = 12
"""Series of a chart: those that are worst."""
MOST_ROWS: Final = 64
SHARE: Final = "share of packets"
LEAST_SILENCE: Final = 10.0
SILENT_SHARE: Final = 0.02
"""Seconds, and share of the job, after which a rank without lines is told. Lines become rarer as
the job gets older."""
HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
  color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0 }}
th, td {{ padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }}
th {{ border-bottom: 2px solid #888 }} td:first-child, th:first-child {{ text-align: left }}
.bad {{ background: #fdd }} svg {{ width: 100%; height: auto }}
</style></head><body><h1>{title}</h1>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    how = "what LOSSYCOLL_METRICS=/path/job.jsonl has written, one file for each machine"
    add("files", metavar="FILE", nargs="+", type=Path, help=how)
    how = "the page (default: %(default)s)"
    add("--output", type=Path, default="report.html", metavar="FILE.html", help=how)
    add("--session", default="", help="the job, where files have several")


def run(options: argparse.Namespace) -> int:
    job = chosen(read_files(options.files), options.session)
    must_be_writable(options.output)
    plt = pyplot(Console(stderr=True))
    figures = [*draw(plt, charts_of(job), job.seconds)] if plt is not None else []
    save(options.output, page_of(job, figures))
    print(f"{options.output}: {len(job.ranks)} ranks, {in_words(job.seconds)}, {job.lines} lines")
    for line in findings(job):
        print(f"  {line}")
    return 0


class NoFigures(CommandError):
    """A file has no figures of a job."""


@dataclass
class Job:
    """A job's figures."""

    session: str
    world: int
    ranks: dict[int, History]
    drift: Points
    lines: int
    seconds: float


def read_files(files: Iterable[Path]) -> dict[str, list[Mapping[str, Any]]]:
    jobs: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise NoFigures(f"{file} can't be read: {error.strerror}") from None
        found = [line for line in map(_line, text.splitlines()) if line is not None]
        if not found:
            raise NoFigures(
                f"{file} has no lines of figures: run the job with "
                f"LOSSYCOLL_METRICS=/path/job.jsonl (a file for Prometheus has one moment only)"
            )
        for line in found:
            jobs.setdefault(line["session"], []).append(line)
    return {session: sorted(lines, key=lambda one: one["time"]) for session, lines in jobs.items()}


def _line(text: str) -> Mapping[str, Any] | None:
    """None: it is none, as the last one of a job that was killed may be."""
    try:
        line = json.loads(text)
        checked: list[Any] = [float(line["time"]), int(line["world"]), line["measured"].items()]
        for rank in line["ranks"]:
            checked += [int(rank["rank"]), rank["state"], rank["waits_for"], rank["call_seconds"]]
            checked += [float(value) for value in rank["counters"].values()]
            checked += [
                (link["rank"], float(link["loss"]), float(link["missing"])) for link in rank["link"]
            ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    found: Mapping[str, Any] = line
    return found if isinstance(line["session"], str) else None


def chosen(jobs: Mapping[str, Sequence[Mapping[str, Any]]], session: str) -> Job:
    if not session and len(jobs) > 1:
        raise NoFigures(f"{len(jobs)} jobs; choose one by --session: {', '.join(jobs)}")
    session = session or next(iter(jobs))
    if session not in jobs:
        raise NoFigures(f"no job {session}; there are {', '.join(jobs)}")
    lines = jobs[session]
    begin = at = float(lines[0]["time"])
    ranks: dict[int, History] = {}
    drift = []
    for line in lines:
        at = float(line["time"]) - begin
        for rank in line["ranks"]:
            ranks.setdefault(int(rank["rank"]), []).append((at, rank))
        if math.isfinite(value := float(line["measured"].get("drift", math.nan))):
            drift.append((at, value))
    world = max(int(line["world"]) for line in lines)
    return Job(session, world, dict(sorted(ranks.items())), drift, len(lines), at)


# ---- what is drawn ----


@dataclass(frozen=True)
class Chart:
    """One chart: lines over time."""

    title: str
    unit: str
    series: Series


def charts_of(job: Job) -> list[Chart]:
    """All charts that there is something to draw in."""
    loss: Series = {}
    for number, history in job.ranks.items():
        for at, told in history:
            for link in told["link"]:
                loss.setdefault(f"{number} to {link['rank']}", []).append((at, float(link["loss"])))

    def worst(of: Callable[[History], Points]) -> Series:
        return _worst({f"rank {number}": of(history) for number, history in job.ranks.items()})

    charts = [
        Chart("Loss of links, before recovery", SHARE, _worst(loss)),
        Chart("Missing after recovery", SHARE, worst(_missing)),
        Chart("Step time", "seconds", worst(_steps)),
        Chart("Wait in a call", "seconds", worst(_waits)),
        Chart("Sent", "MB/s", worst(partial(_rates, name="bytes_sent"))),
        Chart("Received", "MB/s", worst(partial(_rates, name="bytes_received"))),
        Chart("Drift of replicas", "share of the norm", {"drift": job.drift} if job.drift else {}),
    ]
    return [chart for chart in charts if chart.series]


def _steps(history: History) -> Points:
    known = ((at, told.get("step_seconds")) for at, told in history)
    return [(at, float(seconds)) for at, seconds in known if seconds is not None]


def _waits(history: History) -> Points:
    """How long a rank has waited; 0 outside of calls, so no line falls from wait to wait."""
    return [(at, float(told["call_seconds"] or 0.0)) for at, told in history]


def _missing(history: History) -> Points:
    """Share of packets missing, between two lines; no number where none came."""
    rows = _increases(history, "packets_missing", "packets_received")
    return [
        (at, lost / (lost + came) if lost + came > 0 else math.nan) for at, _, (lost, came) in rows
    ]


def _rates(history: History, name: str) -> Points:
    rows = _increases(history, name)
    return [(at, more / span / 1e6) for at, span, (more,) in rows if span]


def _increases(history: History, *names: str) -> Iterator[tuple[float, float, list[float]]]:
    """Increases of counters between two lines, with the time of the later one and the span."""
    for (before, first), (at, last) in pairwise(history):
        gone = [float(last["counters"][name]) - float(first["counters"][name]) for name in names]
        yield at, at - before, gone


def _worst(series: Series) -> Series:
    """The series with the highest means, in order of their names; those of zeros are left out."""
    means = {}
    for name, points in series.items():
        told = [value for _, value in points if math.isfinite(value)]
        if any(told):
            means[name] = statistics.fmean(told)
    kept = heapq.nlargest(MOST_LINES, means, key=means.__getitem__)
    return {name: series[name] for name in series if name in kept}


COLUMNS = 2
MOST_CHARTS: Final = 4
"""Charts of a picture: more can't be read in one look."""
LINES = ("-", "--", ":")


def draw(plt: Any, charts: Sequence[Chart], seconds: float) -> Iterator[str]:
    """Pictures (SVG) of the charts, in their order."""
    for first in range(0, len(charts), MOST_CHARTS):
        figure = figure_of(plt, charts[first : first + MOST_CHARTS], seconds)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        plt.close(figure)
        picture = text.getvalue()
        yield picture[picture.find("<svg") :]


def figure_of(plt: Any, charts: Sequence[Chart], seconds: float) -> Any:
    """A figure of at most ``MOST_CHARTS`` charts."""
    from matplotlib.ticker import PercentFormatter

    rows = -(-len(charts) // COLUMNS)
    with plt.rc_context({"font.size": 8, "axes.titlesize": 10, "legend.fontsize": 7}):
        figure, axes = plt.subplots(
            rows, COLUMNS, figsize=(11, 2.9 * rows), layout="constrained", squeeze=False
        )
        for place in axes.flat[len(charts) :]:
            place.set_axis_off()
        for place, chart in zip(axes.flat, charts, strict=False):
            for number, (name, points) in enumerate(chart.series.items()):
                style = {"marker": "o", "markersize": 3} if len(points) < 3 else {}
                style |= {"color": f"C{number % 10}", "linewidth": 1.4}
                style["linestyle"] = LINES[number % len(LINES)]  # equal ones lie on each other
                place.plot(*zip(*points, strict=True), label=name, **style)
            place.set(title=chart.title, xlabel="seconds", ylabel=chart.unit)
            place.set(xlim=(0, seconds or 1), ylim=(0, None))
            place.grid(alpha=0.3)
            if chart.unit == SHARE:
                place.yaxis.set_major_formatter(PercentFormatter(1.0))
            place.legend(ncols=2 if len(chart.series) > 6 else 1, loc="best")
    return figure


# ---- what is said ----


def findings(job: Job) -> list[str]:
    """Return the findings to look at first."""
    found = []
    dead = set()
    waited: dict[int, float] = {}
    for number, history in job.ranks.items():
        last_time, last = history[-1]
        if last["state"] != ALIVE:
            found.append(f"rank {number} was {last['state']} at the end")
        silence = job.seconds - last_time
        if silence > max(LEAST_SILENCE, SILENT_SHARE * job.seconds):
            found.append(
                f"rank {number} told nothing in the last {in_words(silence)}: had it ended?"
            )
        losses: dict[int, list[float]] = {}
        for _, told in history:
            for link in told["link"]:
                peer = int(link["rank"])
                if loss := float(link["loss"]):
                    losses.setdefault(peer, []).append(loss)
                # Nothing arrived at some time; either end may have told it.
                if trouble := link.get("trouble"):
                    dead.add((number, peer) if trouble == NOT_THERE else (peer, number))
            for other in told["waits_for"]:
                waited[other] = max(waited.get(other, 0.0), float(told["call_seconds"] or 0.0))
        for peer, known in sorted(losses.items()):
            if (mean := statistics.fmean(known)) >= BAD_LOSS:
                found.append(f"link from rank {number} to rank {peer}: lost {mean:.1%} on average")
    found += [f"link from rank {here} to rank {there}: was dead" for here, there in sorted(dead)]
    for other in heapq.nlargest(MOST_LINES, waited, key=waited.__getitem__):
        found.append(f"rank {other} was waited for, up to {in_words(waited[other])}")
    return found


def page_of(job: Job, figures: Sequence[str]) -> str:
    title = f"Job {job.session}: {job.world} ranks, {in_words(job.seconds)}"
    parts = [HEAD.format(title=html.escape(title))]
    said = findings(job) or ["Nothing stands out."]
    parts.append("<ul>" + "".join(f"<li>{html.escape(one)}</li>" for one in said) + "</ul>")
    parts += figures or ["<p>No charts: matplotlib is missing.</p>"]
    parts += ["<h2>Ranks</h2>", _ranks(job), "<h2>Links, at the end</h2>", _links(job)]
    return "\n".join([*parts, "</body></html>"])


def _ranks(job: Job) -> str:
    rows = []
    for number, history in job.ranks.items():
        (_, first), (_, last) = history[0], history[-1]
        gone = {name: value - first["counters"][name] for name, value in last["counters"].items()}
        expected = gone["packets_missing"] + gone["packets_received"]
        steps = [seconds for _, seconds in _steps(history)]
        cells = (
            str(number),
            str(last["host"]),
            str(last["state"]),
            in_words(statistics.fmean(steps)) if steps else "",
            f"{gone['packets_missing'] / expected:.3%}" if expected else "",
            str(gone["packets_recovered"]),
            str(gone["packets_resent"]),
            f"{gone['bytes_sent'] / 1e6:.1f}",
            f"{gone['bytes_received'] / 1e6:.1f}",
        )
        rows.append((last["state"] != ALIVE, cells))
    names = ("rank", "host", "state", "step", "missing", "recovered", "resent", "MB sent")
    return _table((*names, "MB received"), rows)


def _links(job: Job) -> str:
    links = [
        (number, link) for number, history in job.ranks.items() for link in history[-1][1]["link"]
    ]
    rows = []
    for number, link in sorted(links, key=lambda one: -float(one[1]["loss"]))[:MOST_ROWS]:
        cells = (
            f"{number} to {link['rank']}",
            str(link["by"]),
            f"{link['loss']:.2%}",
            f"{link['missing']:.3%}",
            in_words(float(link["rtt_seconds"])),
            in_words(float(link["queue_seconds"])),
            f"{float(link['bytes_per_second']) / 1e6:.1f}",
        )
        rows.append((link["loss"] >= BAD_LOSS, cells))
    names = ("link", "by", "loss", "missing", "round trip", "queue", "MB/s allowed")
    return _table(names, rows)


def _table(names: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """A table of rows, each with whether it is marked as bad."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = [f"<table><tr>{head}</tr>"]
    for is_bad, row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr{' class=bad' if is_bad else ''}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])

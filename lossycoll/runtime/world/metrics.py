"""Metrics of a job's ranks on this machine: for Prometheus, or as lines of JSON over time.

One process of a machine tells for all of them: by HTTP the one that gets the port, in a file the
one with the lowest number of those that run. Everything is read from status pages when it is asked
for. Lines, which `lossycoll report` draws, become rarer as the job gets older, so that a file stays
small.
"""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import Record

from .job_status import DEAD, STATES, job_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log: Final = logging.getLogger("lossycoll")
FILE_SECONDS: Final = 10.0
"""Time between two writes of a file."""
RETRY_SECONDS: Final = 10.0
"""Time between two tries to get a port that is taken."""
ANSWER_SECONDS: Final = 5.0
MOST_ANSWER: Final = 1 << 24
"""How long, and how much of what another process tells there is read."""
LOOK_SECONDS: Final = 0.5
"""Time between two checks whether the job is over."""
MOST_LINKS: Final = 32
"""Links of each rank that are told: dead ones, then those that lose most."""
COUNTERS: Final = {
    "operations": "Operations that ended.",
    "bytes_sent": "Bytes sent, headers included.",
    "bytes_received": "Bytes received, headers included.",
    "packets_sent": "Packets sent, resent ones and parity included.",
    "packets_resent": "Packets sent again.",
    "packets_received": "Packets that arrived or were recovered.",
    "packets_recovered": "Packets that parity restored.",
    "packets_missing": "Packets that were given up.",
    "socket_overflow": "Packets that the kernel dropped because the socket buffer was full.",
    "forged": "Datagrams that were sealed with another key, or changed on the way.",
}
"""Names in the engine's statistics, and what they count."""
LINKS: Final = {
    "loss": (
        "lossycoll_link_loss_ratio",
        "Share of packets to peer that the link loses, before recovery.",
    ),
    "missing": ("lossycoll_link_missing_ratio", "Share of packets from peer that stayed missing."),
    "rtt_seconds": ("lossycoll_link_rtt_seconds", "Round trip."),
    "queue_seconds": ("lossycoll_link_queue_seconds", "Wait in queues on the way."),
    "bytes_per_second": ("lossycoll_link_rate_bytes_per_second", "What may be sent to peer."),
}
"""Fields of a link, their names as metrics, and what they are."""
SUFFIX: Final = ".jsonl"
FIRST_SECONDS: Final = 1.0
"""Between the first lines;"""
LINES: Final = 500
"""and from then on the job's age, divided by this."""
LINE_COUNTERS: Final = (
    "operations",
    "bytes_sent",
    "bytes_received",
    "packets_sent",
    "packets_resent",
    "packets_received",
    "packets_recovered",
    "packets_missing",
)
LINE_RANK: Final = (
    "rank", "host", "state", "call", "call_seconds", "waits_for", "step_seconds", "sealed",
)  # fmt: skip
LINE_LINK: Final = (
    "rank", "by", "loss", "missing", "rtt_seconds", "queue_seconds", "bytes_per_second", "trouble",
)  # fmt: skip

measured: Final[dict[str, float]] = {}
"""Latest measurements of this process, equal on all ranks, by name."""


class JobCollector:
    """A collector of prometheus_client. ``read``: the records of the job on this machine."""

    def __init__(self, read: Callable[[], Sequence[Record]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: to be registered isn't to be asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            records = self._read()
        except OSError:
            return
        if records:
            yield from _metrics(records)


def _metrics(records: Sequence[Record]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

    job = job_of(records[0].session, records)
    told = {record.rank: record for record in records}
    ranks = [rank for rank in job["ranks"] if rank["rank"] in told]
    info = InfoMetricFamily("lossycoll_job", "The job.")
    info.add_metric([], {"session": job["session"], "world": str(job["world"])})
    yield info
    yield from _gauges(job, ranks)
    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(f"lossycoll_{name}", text, labels=["rank"])
        for number, record in sorted(told.items()):
            counter.add_metric([str(number)], float(record.stats.get(name, 0)))
        yield counter


def _worst(links: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return sorted(links, key=lambda one: (not one["trouble"], -float(one["loss"])))[:MOST_LINKS]


def _gauges(job: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    state = GaugeMetricFamily(
        "lossycoll_rank_state", "1 for the state that a rank is in.", labels=["rank", "state"]
    )
    for rank in ranks:
        for name in STATES:
            state.add_metric([str(rank["rank"]), name], float(rank["state"] == name))
    yield state
    for field, text in (
        ("call_seconds", "How long a rank has waited in a call; 0: it doesn't."),
        ("step_seconds", "Time of a step; 0: unknown."),
    ):
        gauge = GaugeMetricFamily(f"lossycoll_{field}", text, labels=["rank"])
        for rank in ranks:
            gauge.add_metric([str(rank["rank"])], rank[field] or 0.0)
        yield gauge
    told = "Ranks of the job that this machine knows to be dead."
    dead = GaugeMetricFamily("lossycoll_dead_ranks", told, labels=["session"])
    dead.add_metric([job["session"]], sum(rank["state"] == DEAD for rank in job["ranks"]))
    yield dead
    waited = Counter(other for rank in ranks for other in rank["waits_for"])
    told = "Ranks of this machine that wait for a rank."
    gauge = GaugeMetricFamily("lossycoll_waited_for", told, labels=["rank"])
    for number in sorted({*waited, *(rank["rank"] for rank in ranks)}):
        gauge.add_metric([str(number)], waited[number])
    yield gauge
    for field, (name, text) in LINKS.items():
        gauge = GaugeMetricFamily(name, text, labels=["rank", "peer"])
        for rank in ranks:
            for link in _worst(rank["link"]):
                gauge.add_metric([str(rank["rank"]), str(link["rank"])], link[field])
        yield gauge
    labels = ["rank", "peer", "trouble"]
    gauge = GaugeMetricFamily("lossycoll_link_trouble", "1 for a link that is dead.", labels=labels)
    for rank in ranks:
        for link in _worst(rank["link"]):
            if link["trouble"]:
                gauge.add_metric([str(rank["rank"]), str(link["rank"]), link["trouble"]], 1.0)
    yield gauge


def tell(
    where: str,
    process: int,
    *,
    sealed: bool,
    read: Callable[[], Sequence[Record]],
    is_over: Callable[[], bool],
) -> None:
    """Tells of the job until it is over. ``where``: HOST:PORT to serve at, or the path of a file;
    with lines of JSON if it ends so. ``sealed``: whether the job has a secret: without HOST it is
    then served to this machine alone."""
    lines = where.endswith(SUFFIX)
    registry: Any = None
    if not lines:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            needs = "which needs a package: pip install 'lossycoll[metrics]'"
            log.warning("option metrics is %r, %s", where, needs)
            return
        registry = CollectorRegistry()
        registry.register(JobCollector(read))
    ended = threading.Event()

    def wait(seconds: float) -> bool:
        """True if the job goes on, after so long."""
        left = seconds
        while left > 0 and not (ended.is_set() or is_over()):
            ended.wait(min(left, LOOK_SECONDS))
            left -= LOOK_SECONDS
        return not (ended.is_set() or is_over())

    def run() -> None:
        try:
            if lines:
                write_lines(where, process, read, wait)
            elif where.startswith("/"):
                _write(where, process, registry, read, wait)
            else:
                _serve(where, process, sealed, registry, read, wait)
        except OSError as error:
            log.warning("metrics can't be told at %s: %s", where, error.strerror or error)

    start_thread(run, "lossycoll-metrics", ended.set)


def _serve(
    where: str,
    process: int,
    sealed: bool,
    registry: Any,
    read: Callable[[], Sequence[Record]],
    wait: Callable[[float], bool],
) -> None:
    """Serves while the job goes on. Where the port is taken, it is tried again: the rank that
    serves for this machine may die, and a program that has the port may end."""
    from prometheus_client import start_http_server

    host, _, port = where.rpartition(":")
    address = host.strip("[]") or ("127.0.0.1" if sealed else "0.0.0.0")
    for tries in itertools.count(1):
        try:
            server, thread = start_http_server(int(port), address, registry)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if tries == 2:  # at the first, a job of this program that has just ended may still have it
            records = read()
            is_first = _is_first(process, records)
            if is_first and not _tells(address, int(port), records[0].session):
                log.warning(
                    "metrics can't be told at %s: another program, or another job, has the port "
                    "(`ss -ltnp` names it); choose another one by LOSSYCOLL_METRICS, or end it: "
                    "the port is tried again every %.0f s",
                    where,
                    RETRY_SECONDS,
                )
        if not wait(RETRY_SECONDS):
            return
    while wait(60.0):
        pass
    server.shutdown()
    server.server_close()
    thread.join()


def _is_first(process: int, records: Sequence[Record]) -> bool:
    """True if no process of this machine that runs has a lower number. A dead or stopped one writes
    nothing, and its record stays for a while."""
    running = (
        record.process
        for record in records
        if record.state != status_page.STOPPED and not status_page.is_gone(record)
    )
    return process == min(running, default=-1)


def _tells(address: str, port: int, session: str) -> bool:
    """True if metrics of this job are told there, by another rank of this machine."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    asked = http.client.HTTPConnection(own, port, timeout=ANSWER_SECONDS)
    try:
        asked.request("GET", "/metrics")
        return session.encode() in asked.getresponse().read(MOST_ANSWER)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        asked.close()


def _write(
    where: str,
    process: int,
    registry: Any,
    read: Callable[[], Sequence[Record]],
    wait: Callable[[float], bool],
) -> None:
    from prometheus_client import write_to_textfile

    def write() -> None:
        if _is_first(process, read()):
            write_to_textfile(where, registry)

    attempt = _Attempts(where, write)
    while wait(FILE_SECONDS):
        attempt()


class _Attempts:
    """Writes that may fail: a disk is full for a while, a network's file system is away. The first
    failure is logged, and the first success after it."""

    def __init__(self, where: str, write: Callable[[], None]) -> None:
        self._where, self._write = where, write
        self._fails = False

    def __call__(self) -> None:
        try:
            self._write()
        except OSError as error:
            if not self._fails:
                log.warning(
                    "metrics can't be written to %s: %s; further tries follow",
                    self._where,
                    error.strerror or error,
                )
            self._fails = True
            return
        if self._fails:
            log.warning("metrics are written to %s again", self._where)
        self._fails = False


# ---- lines of JSON ----


def line_of(records: Sequence[Record], now: float) -> dict[str, Any]:
    """One moment of a job's processes on this machine. ``now``: seconds since 1970."""
    job = job_of(records[0].session, records)
    counted = {record.rank: record.stats for record in records}
    ranks = [_rank(rank, counted[rank["rank"]]) for rank in job["ranks"] if rank["rank"] in counted]
    line = {"time": round(now, 3), "session": job["session"], "world": job["world"]}
    return line | {"measured": dict(measured), "ranks": ranks}


def _rank(rank: Mapping[str, Any], stats: Mapping[str, int]) -> dict[str, Any]:
    return {
        **{name: rank[name] for name in LINE_RANK},
        "counters": {name: stats.get(name, 0) for name in LINE_COUNTERS},
        "link": [{name: link[name] for name in LINE_LINK} for link in _worst(rank["link"])],
    }


def write_lines(
    path: str,
    process: int,
    read: Callable[[], Sequence[Record]],
    wait: Callable[[float], bool],
) -> None:
    """Appends lines until the job is over; of a machine's processes the one with the lowest number.
    ``wait``: waits for so many seconds; whether the job goes on."""
    begin = time.monotonic()
    lines = _Lines(path, process, read)
    attempt = _Attempts(path, lines.write)
    while wait(max(FIRST_SECONDS, (time.monotonic() - begin) / LINES)):
        attempt()


class _Lines:
    def __init__(self, path: str, process: int, read: Callable[[], Sequence[Record]]) -> None:
        self._path, self._process, self._read = path, process, read
        self._is_cut = False
        """A part of the latest line was written, as far as there was room."""

    def write(self) -> None:
        records = self._read()
        if not _is_first(self._process, records):
            return
        text = json.dumps(line_of(records, time.time()), separators=(",", ":")) + "\n"
        data = ("\n" if self._is_cut else "").encode() + text.encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            written = os.write(file, data)
        finally:
            os.close(file)
        if 0 < written < len(data):
            self._is_cut = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_cut = False

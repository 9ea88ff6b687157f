"""Metrics of a job's ranks on this machine: for Prometheus, or as lines of JSON over time.

One process of a machine tells for all of them: by HTTP the one that gets the port, in a file the
one with the lowest number of those that run. Everything is read from status pages when it is asked
for. Lines, which `lossycoll report` draws, become rarer as the job gets older, so that a file stays
small.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import Record

from .job_status import DEAD, STATES, job_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
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
    "loss": ("link_loss_ratio", "Share of packets to peer that the link loses, before recovery."),
    "missing": ("link_missing_ratio", "Share of packets from peer that stayed missing."),
    "rtt_seconds": ("link_rtt_seconds", "Round trip."),
    "queue_seconds": ("link_queue_seconds", "Wait in queues on the way."),
    "bytes_per_second": ("link_rate_bytes_per_second", "What may be sent to peer."),
}
"""Fields of a link, their names as metrics, and what they are."""
SUFFIX: Final = ".jsonl"
FIRST_SECONDS: Final = 1.0
"""Between the first lines;"""
LINES: Final = 500
"""and from then on the job's age, divided by this."""
LEFT_OUT: Final = ("socket_overflow", "forged")
"""Counters that lines don't have."""
LINE_RANK: Final = (
    "rank", "host", "state", "call", "call_seconds", "waits_for", "step_seconds", "sealed",
)  # fmt: skip
LINE_LINK: Final = (
    "rank", "by", "loss", "missing", "rtt_seconds", "queue_seconds", "bytes_per_second", "trouble",
)  # fmt: skip

measured: Final[dict[str, float]] = {}
"""Latest measurements of this process, equal on all ranks, by name."""


def _metrics(records: Sequence[Record]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    job = job_of(records[0].session, records)
    told = {record.rank: record for record in records}
    ranks = [rank for rank in job["ranks"] if rank["rank"] in told]
    links = [(rank["rank"], link) for rank in ranks for link in _worst(rank["link"])]
    waited = Counter(other for rank in ranks for other in rank["waits_for"])

    def gauge(name: str, text: str, labels: str, *samples: Sequence[Any]) -> Metric:
        return _filled(GaugeMetricFamily(f"lossycoll_{name}", text, labels=labels.split()), samples)

    info = InfoMetricFamily("lossycoll_job", "The job.")
    info.add_metric([], {"session": job["session"], "world": str(job["world"])})
    yield info
    states = [(rank["rank"], name, rank["state"] == name) for rank in ranks for name in STATES]
    yield gauge("rank_state", "1 for the state that a rank is in.", "rank state", *states)
    for name, text in (
        ("call_seconds", "How long a rank has waited in a call; 0: it doesn't."),
        ("step_seconds", "Time of a step; 0: unknown."),
    ):
        yield gauge(name, text, "rank", *((rank["rank"], rank[name] or 0.0) for rank in ranks))
    dead = sum(rank["state"] == DEAD for rank in job["ranks"])
    text = "Ranks of the job that this machine knows to be dead."
    yield gauge("dead_ranks", text, "session", (job["session"], dead))
    numbers = sorted({*waited, *(rank["rank"] for rank in ranks)})
    text = "Ranks of this machine that wait for a rank."
    yield gauge("waited_for", text, "rank", *((number, waited[number]) for number in numbers))
    for entry, (name, text) in LINKS.items():
        figures = [(rank, link["rank"], link[entry]) for rank, link in links]
        yield gauge(name, text, "rank peer", *figures)
    dead_links = [(rank, one["rank"], one["trouble"], 1) for rank, one in links if one["trouble"]]
    yield gauge("link_trouble", "1 for a link that is dead.", "rank peer trouble", *dead_links)
    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(f"lossycoll_{name}", text, labels=["rank"])
        yield _filled(counter, [(n, one.stats.get(name, 0)) for n, one in sorted(told.items())])


def _filled(family: Any, samples: Iterable[Sequence[Any]]) -> Metric:
    """A metric with its ``samples``: the values of its labels, and last its own."""
    for *labels, value in samples:
        family.add_metric([str(label) for label in labels], float(value))
    found: Metric = family
    return found


def _worst(links: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return sorted(links, key=lambda one: (not one["trouble"], -float(one["loss"])))[:MOST_LINKS]


@dataclass(eq=False)
class Exporter:
    """One process's export of its job's metrics, until that is over."""

    where: str  # HOST:PORT to serve at, or the path of a file, of lines of JSON if it ends so
    process: int
    _: KW_ONLY
    sealed: bool  # the job has a secret: without HOST it is served to this machine alone
    read: Callable[[], Sequence[Record]]
    is_over: Callable[[], bool]
    ended: threading.Event = field(default_factory=threading.Event, init=False)
    is_cut: bool = field(default=False, init=False)
    """A part of the latest line was written, as far as there was room."""

    def start(self) -> None:
        """Starts a thread."""
        if not self.where.endswith(SUFFIX):
            try:
                import prometheus_client  # noqa: F401 (whether it is there)
            except ImportError:
                needs = "which needs a package: pip install 'lossycoll[metrics]'"
                log.warning("option metrics is %r, %s", self.where, needs)
                return
        start_thread(self._run, "lossycoll-metrics", self.ended.set)

    def _run(self) -> None:
        try:
            if self.where.endswith(SUFFIX):
                begin = time.monotonic()
                self._repeat(
                    self._add_line, lambda: max(FIRST_SECONDS, (time.monotonic() - begin) / LINES)
                )
                return
            from prometheus_client import CollectorRegistry, write_to_textfile

            registry = CollectorRegistry()
            registry.register(self)
            if self.where.startswith("/"):
                self._repeat(
                    lambda _: write_to_textfile(self.where, registry), lambda: FILE_SECONDS
                )
            else:
                self._serve(registry)
        except OSError as error:
            why = error.strerror or error
            log.warning("metrics can't be told at %s: %s", self.where, why)

    def describe(self) -> list[Metric]:
        """Nothing: to be registered isn't to be asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics, for prometheus_client."""
        with contextlib.suppress(OSError):
            records = self.read()
            yield from _metrics(records) if records else ()

    def _wait(self, seconds: float) -> bool:
        """True if the job goes on, after so long."""
        while seconds > 0 and not (self.ended.is_set() or self.is_over()):
            self.ended.wait(min(seconds, LOOK_SECONDS))
            seconds -= LOOK_SECONDS
        return not (self.ended.is_set() or self.is_over())

    def _repeat(
        self, write: Callable[[Sequence[Record]], None], pause: Callable[[], float]
    ) -> None:
        """Writes again and again, in the process of this machine with the lowest number. That may
        fail: a disk is full for a while, a network's file system is away. The first failure is
        logged, and the first success after it."""
        fails = False
        while self._wait(pause()):
            try:
                records = self.read()
                if _is_first(self.process, records):
                    write(records)
            except OSError as error:
                if not fails:
                    why = error.strerror or error
                    text = "metrics can't be written to %s: %s; further tries follow"
                    log.warning(text, self.where, why)
                fails = True
                continue
            if fails:
                log.warning("metrics are written to %s again", self.where)
            fails = False

    def _serve(self, registry: CollectorRegistry) -> None:
        """Serves while the job goes on. Where the port is taken, it is tried again: the rank that
        serves for this machine may die, and a program that has the port may end."""
        from prometheus_client import start_http_server

        host, _, port = self.where.rpartition(":")
        address = host.strip("[]") or ("127.0.0.1" if self.sealed else "0.0.0.0")
        for tries in itertools.count(1):
            try:
                server, thread = start_http_server(int(port), address, registry)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if tries == 2:  # at the first, a job of this program that has just ended may have it
                records = self.read()
                is_first = _is_first(self.process, records)
                if is_first and not _tells(address, int(port), records[0].session):
                    log.warning(
                        "metrics can't be told at %s: another program, or another job, has the "
                        "port (`ss -ltnp` names it); choose another one by LOSSYCOLL_METRICS, or "
                        "end it: the port is tried again every %.0f s",
                        self.where,
                        RETRY_SECONDS,
                    )
            if not self._wait(RETRY_SECONDS):
                return
        while self._wait(60.0):
            pass
        server.shutdown()
        server.server_close()
        thread.join()

    def _add_line(self, records: Sequence[Record]) -> None:
        text = json.dumps(line_of(records, time.time()), separators=(",", ":")) + "\n"
        data = ("\n" if self.is_cut else "").encode() + text.encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.where, flags, 0o600)
        try:
            written = os.write(file, data)
        finally:
            os.close(file)
        self.is_cut = 0 < written < len(data)
        if self.is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        "counters": {name: stats.get(name, 0) for name in COUNTERS if name not in LEFT_OUT},
        "link": [{name: link[name] for name in LINE_LINK} for link in _worst(rank["link"])],
    }

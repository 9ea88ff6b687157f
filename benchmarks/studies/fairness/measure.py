"""Who gets how much of a link: ``python -m benchmarks.studies.fairness.measure docs``.

Two hosts of the laboratory (``lossycoll lab check``), one link, full in both directions: two jobs
of which the second begins later, and a job beside one TCP flow, with cubic and with bbr. Writes
sharing.json, sharing.png and the table of congestion.md into the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from rich.console import Console

from benchmarks.common.lab_job import run_job
from benchmarks.common.results import ROOT, commit
from benchmarks.studies.quality.report import between, markdown
from lossycoll.errors import LossyError
from lossycoll.lab import Lab
from lossycoll.lab.network import Link, Network, Port

from .flow import Samples

MBIT, RTT_MS, QUEUE_MS = 100.0, 20.0, 25.0
ELEMENTS = 1 << 19
LATER = 5.0
"""Seconds after which the second begins."""
TCP_PORT = 29500


@dataclass(frozen=True)
class Contest:
    """A lossy job, and what comes ``LATER`` seconds later: "job", or TCP's congestion control."""

    beside: str
    loss: float

    @property
    def name(self) -> str:
        other = "a second job" if self.beside == "job" else f"TCP {self.beside}"
        return f"{other}, {self.loss:.1%} lost" if self.loss else other


CONTESTS = (Contest("job", 0.0), Contest("job", 0.01), Contest("cubic", 0.0), Contest("bbr", 0.0))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.fairness.measure", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where sharing.json, .png and congestion.md are")
    parser.add_argument("--seconds", type=float, default=25.0, help="of sharing, per contest")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    found = []
    for contest in CONTESTS:
        try:
            found.append(hold(contest, options.seconds))
        except LossyError as error:
            console.print(str(error), markup=False)
            return 1
        console.print(f"{contest.name}: {', '.join(cells_of(found[-1])[1:])}", markup=False)
    entries = {"commit": commit("studies/fairness"), "contests": found}
    (options.folder / "sharing.json").write_text(json.dumps(entries, indent=1) + "\n")
    page = options.folder / "congestion.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(between(text, "sharing", table(found)), encoding="utf-8")
    draw(found, options.folder / "sharing.png")
    return 0


def hold(contest: Contest, seconds: float) -> dict[str, Any]:
    """Runs a contest. Raises LossyError where a process fails."""
    port = Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=QUEUE_MS)
    network = Network(hosts=2, link=Link(loss=contest.loss, delay_ms=RTT_MS / 2), port=port)
    with tempfile.TemporaryDirectory() as folder, Lab(network) as lab:
        outs = [Path(folder) / name for name in ("first", "second")]
        failed: list[LossyError] = []

        def job(out: Path, length: float, master_port: int) -> None:
            config = {"elements": ELEMENTS, "seconds": length}
            environment = {"MASTER_PORT": str(master_port)}
            try:
                run_job(
                    lab,
                    "benchmarks.studies.fairness.job",
                    config,
                    out,
                    60 + 2 * length,
                    environment,
                )
            except LossyError as error:
                failed.append(error)

        first = threading.Thread(target=job, args=(outs[0], LATER + seconds, 29400))
        first.start()
        begun = Path(f"{outs[0]}.begun")
        while first.is_alive() and not begun.exists():
            first.join(0.1)
        first.join(LATER)
        if contest.beside == "job":
            job(outs[1], seconds, 29401)
        else:
            tcp(lab, contest.beside, seconds, outs[1])
        first.join()
        if failed:
            raise failed[0]
        samples = [json.loads(out.read_text()) for out in outs]
        counters = lab.counters()
    dropped = sum(host.up.dropped + host.down.dropped for host in counters.hosts)
    offered = sum(link.offered for link in counters.links.values())
    return {**asdict(contest), "samples": samples, "queue_drops": dropped / offered}


def tcp(lab: Lab, control: str, seconds: float, out: Path) -> None:
    flow = [sys.executable, "-m", "benchmarks.studies.fairness.flow"]
    where = {"PYTHONPATH": str(ROOT)}
    receiver = lab.start(1, [*flow, "receive", str(TCP_PORT), str(out)], where)
    config = {"address": lab.address(1), "control": control, "seconds": seconds}
    sender = lab.start(0, [*flow, "send", str(TCP_PORT), json.dumps(config)], where)
    for process in (sender, receiver):
        if process.wait(60 + seconds):
            raise LossyError(f"the TCP flow with {control} failed")


def shares(entry: dict[str, Any]) -> tuple[float, float]:
    """Mbit/s of both, over the last two thirds of the time in which both sent."""
    first, second = entry["samples"]
    begin, end = second[0][0], min(first[-1][0], second[-1][0])
    begin += (end - begin) / 3
    return rate(first, begin, end), rate(second, begin, end)


def rate(samples: Samples, begin: float, end: float) -> float:
    within = [(when, total) for when, total in samples if begin <= when <= end]
    (first, least), (last, most) = within[0], within[-1]
    return (most - least) * 8e-6 / (last - first)


def cells_of(entry: dict[str, Any]) -> list[str]:
    first, second = shares(entry)
    contest = Contest(entry["beside"], entry["loss"])
    both = first + second
    return [
        contest.name,
        f"{first:.0f}",
        f"{second:.0f}",
        f"{first / both:.0%}",
        f"{both / MBIT:.0%}",
        f"{entry['queue_drops']:.2%}",
    ]


def table(found: Sequence[dict[str, Any]]) -> str:
    head = ["a job beside", "its Mbit/s", "the other's", "its share", "of the link", "queue drops"]
    return markdown(head, [cells_of(entry) for entry in found])


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Rates over time, one panel for each contest."""
    size = (9.5, 5.6)
    figure, axes = plt.subplots(2, 2, figsize=size, layout="constrained", sharey=True)
    for axis, entry in zip(axes.flat, found, strict=True):
        begin = entry["samples"][0][0][0]
        names = ("a lossy job", Contest(entry["beside"], 0.0).name)
        for samples, colour, name in zip(
            entry["samples"], ("tab:red", "tab:blue"), names, strict=True
        ):
            x, y = zip(*smoothed(samples), strict=True)
            axis.plot([when - begin for when in x], y, color=colour, label=name)
        axis.axhline(MBIT, color="black", linestyle=":", linewidth=1)
        axis.set_title(Contest(entry["beside"], entry["loss"]).name, fontsize=10)
        axis.set_xlabel("s")
        axis.set_ylabel("Mbit/s received")
        axis.set_ylim(0, 1.1 * MBIT)
        axis.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smoothed(samples: Samples) -> list[tuple[float, float]]:
    """Rates over two seconds: bytes of a job are counted when its operations end."""
    out = []
    first = 0
    for when, total in samples:
        while when - samples[first][0] > 2:
            first += 1
        begin, before = samples[first]
        if when - begin > 1:
            out.append(((when + begin) / 2, (total - before) * 8e-6 / (when - begin)))
    return out


if __name__ == "__main__":
    sys.exit(main())

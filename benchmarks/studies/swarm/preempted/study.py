"""Peers of unlike speed that are preempted: ``python -m benchmarks swarm/preempted --report docs``.

The demo's model is trained over the laboratory's ``home`` by six peers whose speeds are 1:2:4. One
after another is killed by SIGKILL, and started again after a pause. By a swarm of lossycoll, by
gloo with restarts from a checkpoint, by gossip and, with --hivemind PYTHON, by hivemind: all with
the same peers, data and preemptions. Needs the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.common import training
from benchmarks.common.runner import Study, one_by_one
from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT
from lossycoll.cli.demo.worker import Validation
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

from ..study import possible
from ..talk import Talking
from .peer import GO
from .runs import HIVEMIND, PEERS, PROFILE, SPEEDS, VARIANTS, WATCHED, Budget, Preemption, Run, runs

HOST: Final = "benchmarks.studies.swarm.preempted.host"
SERVES: Final = "gossip"
"""The variant that needs no process that stays, in which all peers meet."""
START_SECONDS: Final = 300.0
"""For starting and joining, beside the training."""
AGAIN_SECONDS: Final = 2.0
"""After which a supervisor starts what has ended by itself."""
POLL_SECONDS: Final = 0.02
MOST_CRASHES: Final = 20
"""Peers that end by themselves: more, and the run has failed."""


class Host(Talking):
    """A machine of the study: it starts its peer, and kills it."""

    def __init__(self, lab: Lab, number: int, run: Run, python: str, folder: str) -> None:
        variant, budget = VARIANTS[run.variant], run.budget
        self.number, self.life, self.lives = number, -1, False
        self._config = {
            "peer": number,
            "addresses": [lab.address(one) for one in range(PEERS)],
            "always": lab.address(PEERS),
            "serves": number == PEERS,
            "folder": folder,
            "train": asdict(run.train()),
            "step": budget.step / SPEEDS[number] if number < PEERS else 0.0,
            "local": max(1, round(variant.factor * budget.local)),
            "batch": budget.batch,
            "target": round(variant.factor * budget.target),
            "wire": variant.wire,
            "control": variant.control,
        }
        environment = {
            "LOSSYCOLL_INTERFACE": "eth0",
            "LOSSYCOLL_HOST": f"host{number}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        super().__init__(lab, number, [python, "-m", HOST, variant.by, str(run.seed)], environment)

    def start(self) -> None:
        """Starts the peer by the same configuration, but for the number of its life."""
        self.life += 1
        self.lives = True
        self.tell(start={**self._config, "life": self.life})

    def kill(self) -> None:
        """Kills the peer."""
        self.lives = False
        self.tell(kill=True)

    @property
    def has_ended(self) -> bool:
        """The peer should live, and doesn't."""
        return self.lives and len(self.said("ended")) > self.life

    def end(self) -> None:
        """Ends the peer and the host."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(Exception):
            self._process.wait(5)
        super().end()


@dataclass
class Away:
    """A peer that isn't there: since when, until when, by the run's clock."""

    peer: int
    at: float
    until: float
    preempted: bool


class Course:
    """What happens in one run, in its order."""

    def __init__(self, lab: Lab, run: Run, python: str, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._together = VARIANTS[run.variant].together
        serves = VARIANTS[run.variant].by != SERVES
        self.hosts = [
            Host(lab, number, run, python, str(folder)) for number in range(PEERS + serves)
        ]
        self.peers = self.hosts[:PEERS]
        self._away: list[Away] = []
        self.starts: list[tuple[int, int, float]] = []
        """Peer, its life, when it was started again."""
        self.crashes: list[str] = []
        self.begin = 0.0

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        until = time.monotonic() + START_SECONDS
        while not done():
            bad = [host for host in self.hosts if host.has_ended]
            if bad or time.monotonic() > until:
                errors = "".join(bad[0].errors[-20:]) if bad else "not in time"
                raise LossyError(f"{what}: {errors}")
            time.sleep(POLL_SECONDS)

    def run(self) -> None:
        """Raises LossyError if peers don't begin, or end by themselves again and again."""
        self._wait("hosts", lambda: all(host.said("ready") for host in self.hosts))
        for host in self.hosts:
            host.start()
        self._wait("peers", lambda: all(peer.said("in") for peer in self.peers))
        self.begin = time.monotonic() + 1.0
        (self._folder / "begin").write_text(str(self.begin))
        (self._folder / "begin").rename(self._folder / GO)
        left = self._run.preemptions
        while (now := time.monotonic() - self.begin) < self._run.budget.seconds:
            while left and left[0].at <= now:
                self._preempt(left.pop(0), now)
            self._watch(now)
            self._bring_back(now)
            time.sleep(POLL_SECONDS)

    def _preempt(self, one: Preemption, now: float) -> None:
        self.peers[one.peer].kill()
        # A job's ranks may be away since another was preempted.
        self._away = [away for away in self._away if away.peer != one.peer]
        self._away.append(Away(one.peer, now, one.at + one.pause, True))
        if self._together:
            self._end_all(now)

    def _end_all(self, now: float) -> None:
        for peer in self.peers:
            if peer.lives:
                peer.kill()
                self._away.append(Away(peer.number, now, now, False))

    def _watch(self, now: float) -> None:
        """A peer that has ended by itself is started again, as by a supervisor."""
        for peer in self.peers:
            if peer.has_ended:
                peer.lives = False
                self.crashes.append(f"peer {peer.number}: {''.join(peer.errors[-1:]).strip()}")
                if len(self.crashes) > MOST_CRASHES:
                    raise LossyError(f"{self.crashes[-1]}\n{''.join(peer.errors[-30:])}")
                self._away.append(Away(peer.number, now, now + AGAIN_SECONDS, False))
                if self._together:
                    self._end_all(now)

    def _bring_back(self, now: float) -> None:
        due = [away for away in self._away if away.until <= now]
        if self._together and len(due) < len(self._away):
            return  # all start at once
        for away in due:
            peer = self.peers[away.peer]
            peer.start()
            self._away.remove(away)
            self.starts.append((peer.number, peer.life, time.monotonic()))

    def figures(self) -> dict[str, Any]:
        """What there is to say of it, but for losses."""
        lines = [line for peer in self.peers for line in list(peer.lines)]
        steps: dict[tuple[int, int], int] = {}
        for line in lines:
            if line["kind"] in ("steps", "round"):
                place = line["peer"], line["life"]
                steps[place] = max(steps.get(place, 0), line["steps"])
        began = {(one["peer"], one["life"]): one for one in lines if one["kind"] == "begins"}
        rounds = self.peers[WATCHED].said("round")
        return {
            "steps": [
                sum(count for (peer, _), count in steps.items() if peer == number)
                for number in range(PEERS)
            ],
            "back": [
                [peer, round(at - self.begin, 2), round(began[peer, life]["time"] - at, 2)]
                for peer, life, at in self.starts
                if (peer, life) in began
            ],
            "rounds": len(rounds),
            "members": sum(line["members"] for line in rounds) / max(1, len(rounds)),
            "failed": sum(bool(line["failure"]) for line in lines if line["kind"] == "round"),
            "preempted": [[one.peer, one.at, one.pause] for one in self._run.preemptions],
            "crashes": self.crashes,
        }


def judged(run: Run, folder: Path) -> dict[str, Any]:
    """The losses of what peers have left: the watched one's by time, each one's last."""
    torch.set_num_threads(1)
    config = run.train()
    model = ByteGPT(config.layers, config.width, config.context)
    validation = Validation(demo_data.load(config.seed).validation, config)

    def loss(path: Path) -> float:
        values = torch.load(path, weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        return validation.loss(model)

    kept = sorted((float(path.stem.removeprefix("at-")), path) for path in folder.glob("at-*.pt"))
    return {
        "curve": [[at, loss(path)] for at, path in kept],
        "losses": [loss(path) for path in sorted(folder.glob("last-*.pt"))],
    }


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One training. Raises LabError without a laboratory, LossyError where peers fail."""
    python = options.hivemind if VARIANTS[run.variant].by == HIVEMIND else sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Lab(PROFILE, hosts=PEERS + 1) as lab:
            course = Course(lab, run, python, folder)
            try:
                course.run()
            finally:
                for host in course.hosts:
                    host.end()
            counters = lab.counters()
        figures = {**course.figures(), **judged(run, folder)}
    if len(figures["curve"]) < 3:
        said = "".join(course.peers[WATCHED].errors)
        raise LossyError(f"peer {WATCHED} had {len(figures['curve'])} rounds:\n{said}")
    sent = sum(host.up.bytes for host in counters.hosts)
    return {**figures, "bytes": sent, "load": os.getloadavg()[0]}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--seconds", type=float, default=Budget.seconds, help="of training (%(default)s)")
    add("--step", type=float, default=Budget.step, help="seconds of a slow peer's step")
    add("--local", type=int, default=Budget.local, help="a slow peer's steps from round to round")
    add("--gap", type=float, default=Budget.gap, help="mean seconds between preemptions")
    add("--pause", type=float, default=Budget.pause, help="mean seconds until a peer is back")
    add("--hivemind", default="", metavar="PYTHON", help="an interpreter that imports hivemind")


def plan(options: argparse.Namespace) -> list[Run]:
    """What can be run here of what is asked for; what is only reported needs no hivemind."""
    training.check_seeds(options.seeds)
    budget = Budget(options.seconds, options.step, options.local, options.gap, options.pause)
    asked = {name: VARIANTS[name] for name in options.variants}
    return list(runs(options.seeds, possible(asked, options), budget))


STUDY = Study(
    name="swarm/preempted",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    alike=lambda run: run.variant,
    failures_allowed=3,
    report_help="folder of moshpit.md",
)

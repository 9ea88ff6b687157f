"""A model trained by eight peers at home: ``python -m benchmarks swarm --report docs``.

The demo's model is trained by a swarm of eight over the laboratory's ``home``: without faults, and
with two peers killed and two that join. With --hivemind PYTHON, an interpreter that imports
hivemind, by that as well. Needs the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol

from benchmarks.common import tcp, training
from benchmarks.common.runner import Study, one_by_one
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

from .runs import (
    HIVEMIND,
    JOINED,
    KILLED,
    NEWCOMERS,
    PEERS,
    PROFILE,
    VARIANTS,
    Budget,
    Fault,
    Run,
    runs,
)
from .talk import Talking

PEER: Final = "benchmarks.studies.swarm.peer"
START_SECONDS: Final = 300.0
"""For starting, joining and judging, beside the training."""
POLL_SECONDS: Final = 0.05


class Peer(Talking):
    """A process of the study on its host, and what it says."""

    def __init__(self, lab: Lab, number: int, run: Run, python: str, secret: str) -> None:
        variant = VARIANTS[run.variant]
        self.number = number
        self.killed = False
        config = {
            "peer": number,
            "address": lab.address(number),
            "train": asdict(run.train()),
            "every": run.budget.every,
            "by": variant.by,
            "wire": variant.wire,
            "control": variant.control,
            "secret": secret,
            "comes late": number >= PEERS,
        }
        super().__init__(lab, number, [python, "-m", PEER, json.dumps(config)], {})

    @property
    def is_training(self) -> bool:
        """It has begun, has had a round, and isn't done."""
        alive = self._process.poll() is None
        return alive and bool(self.said("round")) and not self.said("trained")

    @property
    def step(self) -> int:
        rounds = self.said("round")
        return int(rounds[-1]["step"]) if rounds else 0

    def kill(self) -> None:
        """With all processes that it has made."""
        self.killed = True
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code != -signal.SIGKILL:
            raise LossyError(f"peer {self.number} had ended with status {code} before its time")

    def check(self) -> None:
        """Raises LossyError if it has failed."""
        code = self._process.poll()
        if code and not self.killed:
            raise LossyError(f"peer {self.number}, status {code}:\n{''.join(self.errors)}")


class Course:
    """What happens in one run, in its order."""

    def __init__(self, lab: Lab, run: Run, python: str) -> None:
        self._until = time.monotonic() + run.budget.limit + START_SECONDS
        self._run = run
        count = PEERS + (NEWCOMERS if run.faults else 0)
        secret = secrets.token_hex(16)
        self.peers = [Peer(lab, number, run, python, secret) for number in range(count)]
        self.faults: list[dict[str, Any]] = []

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        while not done():
            for peer in self.peers:
                peer.check()
            if time.monotonic() > self._until:
                said = "; ".join(f"{p.number}: {p.lines[-1:]}" for p in self.peers)
                raise LossyError(f"{what}: not in time; the last that peers said: {said}")
            time.sleep(POLL_SECONDS)

    def run(self) -> None:
        """Raises LossyError if a peer fails, or a fault can't be."""
        first, others = self.peers[0], self.peers[1:PEERS]
        self._wait("ready", lambda: all(peer.said("ready") for peer in self.peers))
        first.tell(join=[])
        self._wait("the first is in", lambda: bool(first.said("in")))
        for peer in others:
            peer.tell(join=first.said("in")[0]["places"])
        self._wait("all are in", lambda: all(peer.said("in") for peer in others))
        for peer in self.peers[:PEERS]:
            peer.tell(begin=True)
        for fault in self._run.faults:
            at = fault.share * self._run.budget.steps
            self._wait(f"step {at:g}", lambda at=at: first.step >= at)  # type: ignore[misc]
            self._happen(fault)
        left = [peer for peer in self.peers if not peer.killed]
        self._wait("done", lambda: all(peer.said("done") for peer in left))

    def _happen(self, fault: Fault) -> None:
        peer, first = self.peers[fault.peer], self.peers[0]
        now = time.monotonic()
        seconds = now - first.said("begins")[0]["time"]
        entry = {"kind": fault.kind, "peer": fault.peer, "step": first.step, "seconds": seconds}
        if fault.kind == KILLED:
            if not peer.is_training:
                raise LossyError(f"peer {peer.number} wasn't training when it was to be killed")
            peer.kill()
        else:
            peer.tell(join=first.said("in")[0]["places"])
        self.faults.append({**entry, "time": now})

    def figures(self) -> dict[str, Any]:
        """What there is to say of it."""
        first = self.peers[0]
        left = [peer for peer in self.peers if not peer.killed]
        for entry in self.faults:
            peer, began = self.peers[entry["peer"]], entry.pop("time")
            entry["rounds"] = len(peer.said("round"))
            for line in peer.said("caught up"):
                entry["caught up"] = {"after": line["time"] - began, "step": line["step"]}
                entry["caught up"] |= line["report"]
        names = ("step", "spent", "members", "contributions", "kept", "waited", "seconds")
        return {
            "curve": first.said("done")[0]["curve"],
            "losses": {str(peer.number): peer.said("done")[0]["loss"] for peer in left},
            "rounds": [[line[name] for name in names] for line in first.said("round")],
            "failed": [
                [peer.number, line["step"], line["failure"]]
                for peer in self.peers
                for line in peer.said("round")
                if line["failure"]
            ],
            "faults": self.faults,
        }


def check_faults(faults: Sequence[Fault], figures: dict[str, Any]) -> None:
    """Raises LossyError unless each fault has happened, and was one: a peer that was killed had
    trained, a newcomer has caught up, the others averaged without the one and with the other."""
    happened = {(one["kind"], one["peer"]): one for one in figures["faults"]}
    if len(happened) != len(faults):
        raise LossyError(f"{len(happened)} faults have happened, wanted {len(faults)}")
    members, there = PEERS, []
    for fault in faults:
        one = happened.get((fault.kind, fault.peer))
        if one is None or not one["rounds"]:
            raise LossyError(f"peer {fault.peer} wasn't {fault.kind}, or had no round: {one}")
        caught = one.get("caught up")
        if fault.kind == JOINED and not (caught and caught["step"] > 0):
            raise LossyError(f"peer {fault.peer} hasn't caught up: {one}")
        members += 1 if fault.kind == JOINED else -1
        there.append((one["step"], members))
    rounds = figures["rounds"]
    for i, (step, wanted) in enumerate(there):
        until = there[i + 1][0] if i + 1 < len(there) else rounds[-1][0]
        found = [one[2] for one in rounds if step < one[0] <= until]
        if wanted not in found:
            raise LossyError(f"no round of {wanted} from step {step} to {until}: {found}")


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """One training. Raises LabError without a laboratory, LossyError where a peer fails."""
    python = options.hivemind if VARIANTS[run.variant].by == HIVEMIND else sys.executable
    with Lab(PROFILE, hosts=PEERS + NEWCOMERS) as lab:
        course = Course(lab, run, python)
        try:
            course.run()
        finally:
            for peer in course.peers:
                peer.end()
        counters = lab.counters()
    figures = course.figures()
    check_faults(run.faults, figures)
    hosts = counters.hosts
    return {
        **figures,
        "network": {
            "bytes": sum(host.up.bytes for host in hosts),
            "lost": sum(link.lost for link in counters.links.values()),
            "queues": sum(host.up.dropped + host.down.dropped for host in hosts),
        },
    }


HOW_TO = "python -m venv hm; hm/bin/pip install hivemind torch; --hivemind hm/bin/python"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=Budget.steps, help="of each peer (%(default)s)")
    add("--every", type=int, default=Budget.every, help="steps from round to round (%(default)s)")
    add("--width", type=int, default=Budget.width, help="of the model, two blocks deep")
    add("--batch", type=int, default=Budget.batch, help="windows of 64 bytes per peer and step")
    add("--limit", type=float, default=Budget.limit, help="seconds of training for a run")
    add("--hivemind", default="", metavar="PYTHON", help="an interpreter that imports hivemind")


def plan(options: argparse.Namespace) -> list[Run]:
    """What can be run here of what is asked for; what is only reported needs no hivemind."""
    training.check_seeds(options.seeds)
    budget = Budget(options.steps, options.every, options.width, options.batch, options.limit)
    return list(runs(options.seeds, possible(VARIANTS, options), budget))


class Contestant(Protocol):
    """``by``: the module that averages. ``control``: TCP's congestion control that it needs."""

    @property
    def by(self) -> str: ...
    @property
    def control(self) -> str: ...


def possible(variants: Mapping[str, Contestant], options: argparse.Namespace) -> list[str]:
    """Names of what can be measured, or only reported, on this machine; says what is left out."""
    known = ("", *tcp.allowed())
    without = () if getattr(options, "report_only", False) else missing(options.hivemind)
    return [name for name, of in variants.items() if of.control in known and of.by not in without]


def missing(python: str) -> tuple[str, ...]:
    """Who can't average here; says so."""
    if not python:
        print(f"hivemind is left out; to have it: {HOW_TO}", file=sys.stderr)
        return (HIVEMIND,)
    try:
        tried = subprocess.run(
            [python, "-c", "import hivemind"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ValueError(f"--hivemind {python}: {error.strerror}") from error
    if tried.returncode:
        last = tried.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"--hivemind {python} can't import hivemind: {last}; {HOW_TO}")
    return ()


STUDY = Study(
    name="swarm",
    description=__doc__,
    arguments=arguments,
    plan=plan,
    measuring=one_by_one(measure),
    alike=lambda run: run.variant,
    report_help="folder of moshpit.md",
)

"""Rounds by the samples of all peers: over real sockets, each peer by a thread."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lossycoll import MoshpitAverager, MoshpitSGD, OptionError, Swarm
from lossycoll.errors import ClosedError
from lossycoll.train.moshpit.pace import Pace
from tests.support.swarms import Make, all_do, at_once
from tests.train.moshpit.test_sgd import backward, inner, model

BATCH = 8


@dataclass
class Ran:
    """What a peer did, and seconds of it.

    Attributes:
        waited: In the swarm's optimizer, beyond the steps of the one inside.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    reports: list[Any] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the steps that it could have taken without the swarm."""
        return 1 - self.waited / self.seconds


def trains(
    swarm: Swarm, pause: float, seconds: float, weight: float = BATCH, **how: Any
) -> tuple[MoshpitSGD, Ran]:
    """Steps that take ``pause``."""
    own, ran, inside = model(), Ran(), 0.0
    optimizer = inner(own.parameters())
    taken = optimizer.step

    def timed(*given: Any) -> Any:
        nonlocal inside
        begin = time.monotonic()
        found = taken(*given)
        inside += time.monotonic() - begin
        return found

    optimizer.step = timed  # type: ignore[method-assign,assignment]
    averager = MoshpitAverager(swarm, own.parameters())
    training = MoshpitSGD(own, optimizer, averager, **{"timeout": 20.0, **how})
    averager.wait_for(3)
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        time.sleep(pause)
        training.zero_grad()
        backward(own, 0, ran.steps)
        ran.steps += 1
        before, inside = time.monotonic(), 0.0
        ran.reports.append(training.step(weight=weight))
        ran.waited += time.monotonic() - before - inside
    ran.seconds = time.monotonic() - begin
    ran.reports = [one for one in (*ran.reports, training.finish()) if one is not None]
    return training, ran


def each(swarms: list[Swarm], pauses: list[float], seconds: float, **how: Any) -> list[Any]:
    """What :func:`trains` returns of each."""
    works = [
        lambda swarm=swarm, pause=pause: trains(swarm, pause, seconds, **how)
        for swarm, pause in zip(swarms, pauses, strict=True)
    ]
    return at_once(*works)


def alone(pause: float, seconds: float) -> int:
    """Number of the same steps that a peer takes without a swarm."""
    own, steps = model(), 0
    optimizer = inner(own.parameters())
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        time.sleep(pause)
        optimizer.zero_grad()
        backward(own, 0, steps)
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.parametrize("delayed", [True, False])
def test_each_peer_has_its_own_pace(delayed: bool, made: Make) -> None:
    """Of speeds 1, 2 and 4, each beside one of its speed that is in no swarm: both suffer alike
    from what else this machine does. Without delay a peer waits for the slowest's present step."""
    pauses, seconds = [0.16, 0.08, 0.04], 7.0
    how: dict[str, Any] = {"target_samples": 350, "delayed": delayed}
    works = [
        lambda one=one, pause=pause: trains(one, pause, seconds, **how)
        for one, pause in zip(made(3), pauses, strict=True)
    ]
    controls = [lambda pause=pause: alone(pause, seconds) for pause in pauses]
    together = at_once(*works, *controls)
    found = together[:3]
    for (training, ran), possible in zip(found, together[3:], strict=True):
        assert len(ran.reports) >= 3
        whole = ran.reports[:-1]  # others may have stopped before the last
        assert all((one.failure, len(one.members)) == ("", 3) for one in whole), found
        assert all(one.contributions == pytest.approx(3) for one in whole)
        waits = 0 if delayed else len(ran.reports) * pauses[0]
        # At the slowest's pace it would be a half and a quarter for the others. A step more or
        # less is in progress at the end.
        assert ran.steps >= (0.95 - waits / seconds) * possible - 1, together
        assert training.samples == ran.reports[-1].samples >= 350 * len(ran.reports)
    slow, fast = found[0][1].steps, found[-1][1].steps
    assert fast > 2.5 * slow, "each at its own speed"


@pytest.mark.parametrize("delayed", [False, True])
def test_peers_that_began_at_unlike_times_have_their_rounds_in_phase(
    delayed: bool, made: Make
) -> None:
    """Rounds by time: they wait for one another once, and not in each round."""
    swarms, barrier = made(3), threading.Barrier(3)

    def work(number: int) -> list[Any]:
        own = model()
        averager = MoshpitAverager(swarms[number], own.parameters())
        how: dict[str, Any] = {"every_seconds": 1.5, "delayed": delayed, "timeout": 20.0}
        training = MoshpitSGD(own, inner(own.parameters()), averager, **how)
        averager.wait_for(3)
        barrier.wait()
        training._pace.began = time.monotonic() - 0.5 * number
        reports: list[Any] = []
        while len(reports) < 5:
            time.sleep(0.02)
            training.zero_grad()
            backward(own, number, len(reports))
            report = training.step(weight=BATCH)
            reports += [] if report is None else [report]
        training.finish()
        return reports

    found = all_do(3, work)
    for reports in found:
        assert [(one.failure, len(one.members)) for one in reports] == [("", 3)] * 5
    first, *later = (one.waited for one in found[2])  # the first that is due
    assert statistics.median(later) < first / 3, found


@pytest.mark.parametrize("how", [{"every": 2}, {"every_seconds": 0.01}], ids=["steps", "seconds"])
def test_what_a_step_does_while_the_former_round_is_on(how: dict[str, Any], made: Make) -> None:
    """By steps it waits, so that all peers have taken as many; by seconds or samples none does."""
    (swarm,) = made(1)
    own, goes_on = model(), threading.Event()
    averager = MoshpitAverager(swarm, own.parameters())
    training = MoshpitSGD(own, inner(own.parameters()), averager, delayed=True, **how)
    has_round = averager._member.average
    averager._member.average = (  # type: ignore[method-assign]
        lambda *given: goes_on.wait(30.0) and has_round(*given)  # type: ignore[assignment]
    )

    def steps(count: int) -> list[Any]:
        time.sleep(0.02)
        training.zero_grad()
        backward(own, 0, 0)
        return [training.step(weight=BATCH) for _ in range(count)]

    assert steps(2) == [None] * 2  # a round has begun
    taken: list[list[Any]] = []
    thread = threading.Thread(target=lambda: taken.append(steps(6)))
    thread.start()
    thread.join(1.0 if "every" in how else 30.0)
    assert thread.is_alive() == ("every" in how)
    goes_on.set()
    thread.join(30.0)
    reports = [one for one in (*taken[0], training.finish()) if one is not None]
    assert reports
    assert all(one.failure == "" for one in reports)


def test_a_target_that_nobody_reaches_holds_nobody(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lossycoll"):
        found = each(made(3), [0.01] * 3, 0.5, target_samples=1 << 40, timeout=0.2)
    assert all(ran.reports == [] and ran.share > 0.5 for _, ran in found)
    said = [one.getMessage() for one in caplog.records if "no round for" in one.getMessage()]
    assert len(said) == 3
    assert all("due after 1099511627776 of all peers" in one for one in said)


def test_peers_that_all_have_no_weight_have_no_round(made: Make) -> None:
    found = each(made(3), [0.01] * 3, 0.5, target_samples=8, weight=0.0)
    for training, ran in found:
        assert ran.reports == []
        assert training.samples == 0


def test_gradients_add_up_until_all_have_seen_enough(made: Make) -> None:
    """Fast and slow peers have their rounds together."""
    swarms = made(3)
    how: dict[str, Any] = {"target_samples": 160, "average": "gradients"}
    found = each(swarms, [0.06, 0.03, 0.015], 2.0, **how)
    rounds = [{one.round for one in ran.reports if len(one.members) == 3} for _, ran in found]
    assert len(set.intersection(*rounds)) >= 2, found
    assert all(ran.steps > 2 * len(ran.reports) for _, ran in found[1:])


@pytest.mark.parametrize("delayed", [False, True])
def test_one_that_can_take_no_part_any_more_hears_of_it(delayed: bool, made: Make) -> None:
    """Though no round is due: else it would train alone for ever."""
    (swarm,) = made(1)
    own = model()
    averager = MoshpitAverager(swarm, own.parameters())
    how: dict[str, Any] = {"target_samples": 1 << 20, "delayed": delayed}
    training = MoshpitSGD(own, inner(own.parameters()), averager, **how)
    assert training.step(weight=BATCH) is None
    swarm.close()

    def goes_on() -> None:
        training.step(weight=BATCH)
        training.finish()

    with pytest.raises(ClosedError):
        goes_on()


def test_after_a_round_others_hear_what_is_left_for_the_next() -> None:
    """Another directory hears it again, and would count twice what the round has had."""
    told: list[tuple[int, int]] = []
    averager = SimpleNamespace(progress=lambda *said: told.append(said), is_due=False, peers=1)
    pace = Pace(averager, 1, None, 100, 5.0)  # type: ignore[arg-type]
    pace.since = 60
    pace.tell()
    pace.since += 2  # beside the round
    pace.has_had(130)
    assert (told[-1], pace.since, pace.samples) == ((130, 2), 2, 130)
    pace.since += 10
    assert not pace.is_due(1)
    pace.has_had(142)
    assert (told[-1], pace.since, pace.samples) == ((142, 0), 0, 142)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        *(
            ({"target_samples": target}, "wanted a whole number from 1 to")
            for target in (0, -5, 10**18, float("nan"), 32.0, True)
        ),
        ({"target_samples": 10, "every": 2}, "wanted one of the three"),
        ({"target_samples": 10, "every_seconds": 2.0}, "wanted one of the three"),
    ],
)
def test_targets_that_cannot_be(how: dict[str, Any], said: str, made: Make) -> None:
    (swarm,) = made(1)
    own = model()
    averager = MoshpitAverager(swarm, own.parameters())
    with pytest.raises(OptionError, match=said):
        MoshpitSGD(own, inner(own.parameters()), averager, **how)
    training = MoshpitSGD(own, inner(own.parameters()), averager, target_samples=10)
    for weight in (-1.0, 1e18, float("nan")):
        with pytest.raises(OptionError, match="wanted 0 to 1e6"):
            training.step(weight=weight)

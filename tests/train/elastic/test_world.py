"""ElasticWorld with real processes: killed ones come back, the others go on."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.errors import (
    CheckpointError,
    ClosedError,
    OperationTimeout,
    OptionError,
    PeerLostError,
    RendezvousError,
)
from lossycoll.runtime.world import polled_store
from tests.support.harness import EXACT, Ranks, run_good, run_ranks
from tests.support.store_server import StoreServer
from tests.support.waiting import until

SEATS = 3
RATE = 0.1
BEFORE = 10
"""Steps until somebody dies."""
AFTER = 10
"""Steps after the last has come back."""


def job_store() -> Any:
    """The launcher's: it outlives the ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False)


def inputs(slot: int, step: int) -> Tensor:
    """(1, 4): also the gradient of this slot in this step."""
    return torch.randn(1, 4, generator=torch.Generator().manual_seed(1000 * slot + step))


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, broadcast_buffers=False)


def victims() -> list[int]:
    return [int(slot) for slot in os.environ.get("VICTIMS", "").split(",") if slot]


def job(slot: int, slots: int) -> dict[str, Any]:
    """Trains until it has AFTER steps in a whole group after a change. Victims kill themselves
    before step BEFORE, and their second processes wait for that."""
    store = job_store()
    again = "AGAIN" in os.environ
    if again:
        store.wait([f"died/{one}" for one in victims()])
    torch.manual_seed(slot)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    changes: list[Any] = []
    seen: list[tuple[int, Tensor, Tensor]] = []
    with lossycoll.ElasticWorld(store, slot, slots, timeout=60.0) as world:
        step = world.share(model, optimizer)
        began = step
        ddp, last = wrapped(model), step + AFTER if step else None
        while last is None or step < last:
            if step == BEFORE and slot in victims() and not again:
                store.set(f"died/{slot}", "")
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ddp(inputs(slot, step)).sum().backward()
            optimizer.step()
            momentum = optimizer.state[model.weight]["momentum_buffer"]
            seen.append((step, model.weight.detach().clone(), momentum.clone()))
            step += 1
            change = world.boundary(step)
            if change:
                changes.append(change)
                step = world.share(model, optimizer)
                ddp = wrapped(model)
            if change and len(world.slots) == slots:
                last = step + AFTER
        return {"began": began, "changes": changes, "seen": seen}


def check(values: list[dict[str, Any]], gone: set[int]) -> None:
    """Before the death and after the change all have the weights of a training of all. (In the step
    of a death a mean may be of fewer, and replicas differ.)"""
    changes = values[0]["changes"]
    assert changes[0].lost == tuple(sorted(gone))
    assert {slot for change in changes for slot in change.came} == gone
    assert changes[-1].slots == tuple(range(SEATS))
    whole = max(value["began"] for value in values)  # whoever came last has come
    assert whole > BEFORE
    for value in values:
        for (_, weights, momentum), (step, after, _) in itertools.pairwise(value["seen"]):
            if step < BEFORE or step > whole:
                gradient = torch.stack([inputs(slot, step) for slot in range(SEATS)]).mean(0)
                wanted = weights - RATE * (0.5 * momentum + gradient)
                torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
        assert [step for step, *_ in value["seen"]][-AFTER:] == list(range(whole, whole + AFTER))
    ends = {tuple(value["seen"][-1][1].flatten().tolist()) for value in values}
    assert len(ends) == 1


@pytest.mark.parametrize("gone", [{2}, {0}, {1, 2}], ids=str)
def test_the_killed_come_back(gone: set[int]) -> None:
    order = [*range(SEATS), *sorted(gone)]
    env = {**EXACT, "VICTIMS": ",".join(map(str, gone)), "LOSSYCOLL_LIVENESS": "5"}
    per_rank = {SEATS + at: {"AGAIN": "1"} for at in range(len(gone))}
    with Ranks(job, SEATS, env, ranks=order, per_rank=per_rank) as ranks:
        survivors = [slot for slot in range(SEATS) if slot not in gone]
        outcomes = ranks.collect(90.0)
    for slot in gone:
        assert outcomes[slot].code == -signal.SIGKILL, str(outcomes[slot])
    good = [outcomes[n] for n in (*survivors, *range(SEATS, len(order)))]
    assert not [str(one) for one in good if one.error], "\n".join(map(str, good))
    check([one.value for one in good], gone)


def recovering(slot: int, slots: int) -> dict[str, Any]:
    """Rank 1 leaves by itself after an error that is none of the group's, and comes back."""
    store = job_store()
    world = lossycoll.ElasticWorld(store, slot, slots, timeout=60.0)
    model = nn.Linear(4, 1, bias=False)
    step, changes = world.share(model), []
    while not changes:
        step += 1
        if slot == 1 and step == BEFORE:
            changes.append(world.recover(ValueError("a bad batch"), step))
        elif change := world.boundary(step):
            changes.append(change)
    with torch.no_grad():
        model.weight.fill_(slot)
    shared = world.share(model)
    world.close()
    world.close()
    return {"changes": changes, "steps": (step, shared), "weight": float(model.weight[0, 0])}


def test_one_that_leaves_by_an_error_comes_back() -> None:
    values = run_good(recovering, SEATS, {**EXACT, "LOSSYCOLL_LIVENESS": "5"})
    assert values[1]["changes"][0].came == ()
    most = max(value["steps"][0] for value in values)
    for value in values:
        assert value["changes"][-1].slots == tuple(range(SEATS))
        assert value["changes"][-1].lost == ()
        assert value["steps"][1] == most
    # The state of whoever has had the most steps, the first of several.
    first = min(n for n, value in enumerate(values) if value["steps"][0] == most)
    assert {value["weight"] for value in values} == {float(first)}


class Broken:
    """Has no state that could travel, or takes none."""

    def __init__(self, state: Any, error: str = "") -> None:
        self.state, self.error = state, error

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        if self.error:
            raise ValueError(self.error)


def refused(slot: int, slots: int) -> dict[str, str]:
    """What can't be shared, in one group that goes on."""
    world = lossycoll.ElasticWorld(job_store(), slot, slots, timeout=60.0)
    model = nn.Linear(4, 1)
    found = {}
    for name, parts in {
        "object": [Broken(object())],
        "cannot load": [model, Broken(1, "not today" if slot == 2 else "")],
        "fewer": [model] if slot == 1 else [model, Broken(1)],
    }.items():
        try:
            world.share(*parts)
            found[name] = ""
        except (CheckpointError, PeerLostError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    assert world.share(model) == 0
    for steps in (-1, 2.0, True, 1 << 62):
        with pytest.raises(OptionError, match="wanted a whole number"):
            world.boundary(steps)
    world.close()
    return found


def test_what_cannot_be_shared_is_refused_on_all_ranks() -> None:
    values = run_good(refused, SEATS, EXACT)
    for slot, value in enumerate(values):
        assert value["object"].startswith("CheckpointError"), value
        for name, bad, why in (("cannot load", 2, "not today"), ("fewer", 1, "2 states came")):
            kind = "CheckpointError" if slot == bad else "PeerLostError"
            assert value[name].startswith(f"{kind}: slot {bad} can't take the state of slot 0")
            assert (why in value[name]) == (slot == bad)
    assert "object in a state" in values[0]["object"]


def left_out(slot: int, slots: int) -> dict[str, Any]:
    """Slot 2 comes back, and can't take the state: the others go on without it."""
    store, again = job_store(), "AGAIN" in os.environ
    if again:
        store.wait(["died/2"])
    world = lossycoll.ElasticWorld(store, slot, slots, timeout=20.0)
    parts = [nn.Linear(4, 1), Broken(1, "not today" if again else "")]
    step, failures, changes = 0, [], []
    while len(changes) < 2 and len(failures) < 2:
        try:
            step = world.share(*parts)
            while True:
                if step == BEFORE and slot == 2:
                    store.set("died/2", "")
                    os.kill(os.getpid(), signal.SIGKILL)
                step += 1
                change = world.boundary(step)
                if change:
                    changes.append(change)
                    break
        except CheckpointError as error:
            failures.append(str(error))
            with pytest.raises(CheckpointError, match="continue without this process"):
                world.recover(error, None)
            break
        except PeerLostError as error:
            failures.append(str(error))
            changes.append(world.recover(error, step))
    world.close()
    return {"failures": failures, "changes": changes, "step": step}


def test_one_that_cannot_take_the_state_is_left_out() -> None:
    with Ranks(
        left_out, SEATS, {**EXACT, "LOSSYCOLL_LIVENESS": "5"}, ranks=[0, 1, 2, 2],
        per_rank={3: {"AGAIN": "1"}},
    ) as ranks:  # fmt: skip
        first, second, killed, again = ranks.collect(90.0)
    assert killed.code == -signal.SIGKILL, str(killed)
    for one in (first, second):
        assert not one.error, str(one)
        assert one.value["changes"][-1].slots == (0, 1), str(one)
        assert "slot 2 can't take the state" in one.value["failures"][0]
    assert "not today" in again.value["failures"][0], str(again)


def alone(slot: int, slots: int) -> None:
    """The other slots never come."""
    lossycoll.ElasticWorld(job_store(), slot, slots + 1, timeout=3.0)


def test_a_slot_that_never_comes_is_named() -> None:
    outcomes = run_ranks(alone, 2)
    for outcome in outcomes:
        assert outcome.error == OperationTimeout.__name__, str(outcome)
        assert "slots [2] of 3 have not come to generation 0" in outcome.text


def with_frozen_store(slot: int, slots: int) -> dict[str, Any]:
    """Trains while the store is frozen, asks it in vain, and leaves."""
    polled_store.ANSWER_SECONDS = 2.0  # type: ignore[misc]
    folder = Path(os.environ["FOLDER"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), is_master=False)
    world = lossycoll.ElasticWorld(store, slot, slots, timeout=120.0)
    (folder / f"met {slot}").touch()
    until((folder / "frozen").exists)
    said = []
    for step in range(1, 20):
        assert world.boundary(step) is None
    for _ in range(2):
        try:
            world.recover(ValueError("on purpose"), 20)
        except RendezvousError as error:
            said.append(str(error))
    assert world.boundary(20) is None, "the group goes on"
    world.close()
    return {"said": said}


def test_a_frozen_store_holds_no_rank_that_asks_it(tmp_path: Path) -> None:
    """Its process is stopped, and stays so until all have ended."""
    with closing(StoreServer()) as server:
        env = {**EXACT, "FOLDER": str(tmp_path), "STORE": str(server.port)}
        with Ranks(with_frozen_store, 2, env) as ranks:
            until(lambda: len(list(tmp_path.glob("met *"))) == 2)
            server.freeze()
            (tmp_path / "frozen").touch()
            outcomes = ranks.collect(150.0)
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)
        assert len(outcome.value["said"]) == 2
        for text in outcome.value["said"]:
            assert f"slot {outcome.rank}: the store at port {server.port} gave no answer" in text
            assert "its process is stopped" in text


def displaced(slot: int, slots: int) -> str:
    """Slot 1 is taken by the third process, while the second one still runs."""
    store = job_store()
    if "THIRD" in os.environ:
        store.wait(["met"])
        world = lossycoll.ElasticWorld(store, slot, slots, timeout=30.0)
        world.close()
        return "in"
    world = lossycoll.ElasticWorld(store, slot, slots, timeout=30.0)
    store.set("met", "")
    step = 0
    try:
        while world.generation == 0:
            step += 1
            world.boundary(step)
    except RendezvousError as error:
        return str(error)
    world.close()
    return "in"


def test_a_process_whose_slot_is_taken_ends() -> None:
    with Ranks(
        displaced, 2, {"LOSSYCOLL_LIVENESS": "5"}, ranks=[0, 1, 1], per_rank={2: {"THIRD": "1"}}
    ) as ranks:
        first, second, third = ranks.collect(60.0)
    assert "has this slot now" in second.value, str(second)
    assert (first.value, third.value) == ("in", "in"), f"{first}\n{third}"


@pytest.mark.parametrize("arguments", [(3, 3), (-1, 3)], ids=str)
def test_a_slot_that_is_none(arguments: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="wanted one from 0 to 2"):
        lossycoll.ElasticWorld(dist.HashStore(), *arguments)


@pytest.mark.parametrize(
    "how", [{"grace": 0.0}, {"timeout": -1.0}, {"grace": float("nan")}], ids=str
)
def test_seconds_that_are_none(how: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="wanted seconds above 0"):
        lossycoll.ElasticWorld(dist.HashStore(), 0, 1, **how)


def test_a_group_that_is_there_already() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match="there is a default group already"):
            lossycoll.ElasticWorld(dist.HashStore(), 0, 1)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_closed_world() -> None:
    world = lossycoll.ElasticWorld(dist.HashStore(), 0, 1)
    world.close()
    for call in (
        lambda: world.boundary(1),
        lambda: world.share(nn.Linear(1, 1)),
        lambda: world.recover(ValueError("x"), 1),
    ):
        with pytest.raises(ClosedError, match="was closed"):
            call()
    assert not dist.is_initialized()


def test_a_world_of_one() -> None:
    with lossycoll.ElasticWorld(dist.HashStore(), 0, 1) as world:
        model = nn.Linear(2, 1)
        assert world.share(model) == 0
        assert world.boundary(1) is None
        assert world.boundary(2) is None
        assert (world.slots, world.generation) == ((0,), 0)
    assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_who_ends_in_good_order_leaves_a_mark(fails: bool) -> None:
    """One that fails may be started again."""
    store = dist.HashStore()
    try:
        with lossycoll.ElasticWorld(store, 0, 1):
            if fails:
                raise ValueError("on purpose")
    except ValueError:
        assert fails
    assert store.check(["elastic/ended/0/0"]) is not fails
    assert not dist.is_initialized()

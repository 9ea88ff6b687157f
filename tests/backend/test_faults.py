"""What every rank sees when something goes wrong: the right error, on every rank that can know, in
time. Each test asserts that its fault happened.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import group_steps
from lossycoll.backend.builder import WORLDS
from tests.support.failure_cases import CALM, LIVENESS, QUIET, SLACK
from tests.support.harness import Outcome, Ranks, free_port, init, note, run_good, run_ranks
from tests.support.links import over, over_each_link
from tests.support.waiting import until

# ---- a rank dies or stops ----


def _loop(call: Any) -> Any:
    """Calls until it raises: (type, text, peer, when, seconds of a second call, its type)."""
    count = 0
    while True:
        try:
            call()
        except RuntimeError as error:
            first = time.monotonic()
            caught = error
            break
        count += 1
        if count == 3:
            note("ready")
    after = ""
    try:
        call()
    except RuntimeError as error:  # DDP has its own of a backward pass that didn't end
        after = type(error).__name__
    again = time.monotonic() - first
    return type(caught).__name__, str(caught), getattr(caught, "peer", None), first, again, after


def rank_all_reduce(rank: int, world: int) -> Any:
    init()
    t = torch.ones(200_000)
    return _loop(lambda: dist.all_reduce(t.fill_(1)))


def rank_monitored_barrier(rank: int, world: int) -> Any:
    init()
    group: Any = dist.group.WORLD
    return _loop(group.monitored_barrier)


def rank_point_to_point(rank: int, world: int) -> Any:
    """Rank 0 waits for rank 1, which is alive but waits for rank 2, which is killed."""
    init()
    t = torch.ones(10)
    rounds = 0

    def step() -> None:
        nonlocal rounds
        rounds += 1
        if rank == 2:
            if rounds > 3:
                time.sleep(600)
            dist.send(t, 1)
        elif rank == 1:
            dist.recv(t, 2)
            dist.send(t, 0)
        else:
            dist.recv(t, 1)

    return _loop(step)


KILLS = [
    pytest.param(rank_all_reduce, 1, signal.SIGKILL, marks=pytest.mark.long),
    (rank_all_reduce, 0, signal.SIGKILL),
    (rank_all_reduce, 2, signal.SIGSTOP),
    pytest.param(rank_monitored_barrier, 1, signal.SIGKILL, marks=pytest.mark.long),
    (rank_point_to_point, 2, signal.SIGKILL),
]


@pytest.mark.parametrize(("function", "victim", "how"), KILLS)
def test_a_lost_rank_is_named_by_every_survivor_in_time(
    function: Any, victim: int, how: signal.Signals
) -> None:
    with Ranks(function, 3, QUIET) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready")
        begin = ranks.signal(victim, how)
        survivors = ranks.collect(timeout=60, but=[victim])
        if how == signal.SIGKILL:
            assert ranks.processes[victim].wait(5) == -signal.SIGKILL
        else:
            assert ranks.processes[victim].poll() is None
    for outcome in survivors:
        assert outcome.value is not None, str(outcome)
        kind, text, peer, when, again, after = outcome.value
        assert kind == "PeerLostError"
        assert peer == victim
        killed = how == signal.SIGKILL
        reason = "its process has ended" if killed else "liveness 2 s"
        for part in (f"rank {outcome.rank}/3", f"rank {victim} (127.0.0.1:", reason):
            assert part in text
        # A bound in both ways: of a rank that is stopped, an error that comes at once would mean
        # that skew is taken for death. One that is killed leaves a broken connection.
        assert (0 if killed else 0.25 * LIVENESS) < when - begin < LIVENESS + SLACK, text
        # Afterwards the group refuses at once, with the same reason.
        assert after == "PeerLostError"
        assert again < SLACK


def rank_ddp(rank: int, world: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(300, 300))

    def step() -> None:
        model(torch.ones(2, 300)).sum().backward()

    return _loop(step)


def test_ddp_raises_an_error_that_names_the_lost_rank() -> None:
    with Ranks(rank_ddp, 2, QUIET) as ranks:
        ranks.wait_for(0, "ready")
        begin = ranks.signal(1, signal.SIGKILL)
        (survivor,) = ranks.collect(timeout=60, but=[1])
    assert survivor.value is not None, str(survivor)
    kind, text, _, when, _, _ = survivor.value
    assert kind == "RuntimeError"
    assert "PeerLostError" in text
    assert "lost rank 1 (127.0.0.1:" in text
    assert when - begin < LIVENESS + SLACK


LATE = 1.5 * LIVENESS
"""A silent rank is given up after 0.7 of it, and all have heard of that after 1."""


def rank_late(rank: int, world: int) -> int:
    init()
    t = torch.ones(100_000)
    if rank == 1:
        time.sleep(LATE)
    dist.all_reduce(t)
    assert (t == world).all()
    report = lossycoll.last_report()
    assert report is not None
    return report.packets_missing


def test_a_rank_that_only_computes_for_long_is_waited_for() -> None:
    outcomes = run_ranks(rank_late, 2, QUIET)
    assert [outcome.value for outcome in outcomes] == [0, 0], [str(o) for o in outcomes]
    assert outcomes[0].seconds > LATE


def rank_leaves(rank: int, world: int) -> str:
    init()
    dist.all_reduce(torch.ones(50_000))
    if rank == 1:
        raise ValueError("a bug of the user's")
    with pytest.raises(
        lossycoll.PeerLostError, match=r"rank 1 .*left the group after call #0"
    ) as e:
        dist.all_reduce(torch.ones(50_000))
    assert e.value.peer == 1
    # Else a slow one could come when the other has left as well, and miss that one.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"seen by {rank}", "")
    store.wait(["seen by 0", "seen by 2"])
    return "good"


def test_a_rank_that_ends_with_an_error_of_its_own_is_missed_by_the_others() -> None:
    outcomes = run_ranks(rank_leaves, 3, QUIET)
    assert outcomes[1].error == "ValueError"
    assert [outcome.value for outcome in outcomes] == ["good", None, "good"], str(outcomes[0])
    assert max(outcome.seconds for outcome in outcomes) < 40


def rank_aborts(rank: int, world: int) -> str:
    init()
    dist.all_reduce(torch.ones(50_000))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["1 waits", "2 waits"])
        dist.distributed_c10d._abort_process_group()
        return "good"
    t = torch.ones(50_000)
    work: Any = dist.all_reduce(t, async_op=True) if rank == 1 else dist.irecv(t, 1)
    store.set(f"{rank} waits", "")
    with pytest.raises(lossycoll.AbortedError, match=r"rank 0 .*ended the group"):
        work.wait()
    return "good"


@over_each_link
def test_an_abort_reaches_whoever_waits(link: str) -> None:
    outcomes = run_ranks(rank_aborts, 3, {**CALM, **over(link)})
    assert [outcome.value for outcome in outcomes] == ["good"] * 3, [str(o) for o in outcomes]


def rank_aborts_at_once(rank: int, world: int) -> float:
    init()
    if rank == 0:
        dist.distributed_c10d._abort_process_group()
        return 0.0
    begin = time.monotonic()
    with pytest.raises(lossycoll.AbortedError, match=r"rank 0 .*ended the group"):
        dist.all_reduce(torch.ones(50_000))
    return time.monotonic() - begin


def test_an_abort_right_after_init_reaches_all() -> None:
    for seconds in run_good(rank_aborts_at_once, 3, CALM):
        assert seconds < 1 + SLACK


def rank_timeout(rank: int, world: int) -> Any:
    init(timeout=2.0)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # lives for as long as it is waited for
        store.wait(["rank 0 has its error"], timedelta(seconds=60))
        return None
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(50_000))
    seconds = time.monotonic() - begin
    store.set("rank 0 has its error", "")
    return type(caught.value).__name__, str(caught.value), seconds


def test_a_rank_that_never_takes_part_is_named_after_the_groups_timeout() -> None:
    waiting, _ = run_ranks(rank_timeout, 2, {**QUIET, "LOSSYCOLL_LIVENESS": "10"})
    kind, text, seconds = waiting.value
    assert kind == "OperationTimeout"
    assert "rank 1 (127.0.0.1:" in text
    assert "within 2 s" in text
    assert 1.9 < seconds < 2 + SLACK


def rank_interrupted(rank: int, world: int) -> float:
    init()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # nothing but Ctrl-C ends the other's wait
        store.wait(["interrupted"], timedelta(seconds=60))
        return 0.0
    note("ready")
    try:
        dist.all_reduce(torch.ones(50_000))
    except KeyboardInterrupt:
        when = time.monotonic()
        store.set("interrupted", "")
        return when
    raise AssertionError("not interrupted")


def test_ctrl_c_ends_a_wait() -> None:
    with Ranks(rank_interrupted, 2, QUIET) as ranks:
        ranks.wait_for(0, "ready")
        ranks.wait_until_still(0)
        begin = ranks.signal(0, signal.SIGINT)
        outcome = ranks.collect(60)[0]
    assert outcome.value is not None, str(outcome)
    assert outcome.value - begin < 0.2 + SLACK


# ---- tensors and operations that can't be served ----


def rank_refusals(rank: int, world: int) -> int:
    init()
    good = torch.ones(10)
    meta = torch.ones(10, device="meta")
    refused = lossycoll.UnsupportedError
    ops = dist.ReduceOp
    for match, call in (
        ("on meta, but .* CPU and on CUDA devices", lambda: dist.all_reduce(meta)),
        ("on meta", lambda: dist.broadcast(meta, 0)),
        ("on meta", lambda: dist.all_gather([good, meta], good)),
        ("on meta", lambda: dist.send(meta, 1 - rank)),
        ("AVG of torch.bool", lambda: dist.all_reduce(good.bool(), ops.AVG)),
        ("BAND of torch.float32", lambda: dist.all_reduce(good, ops.BAND)),
        ("SUM of torch.float8", lambda: dist.all_reduce(good.to(torch.float8_e4m3fn))),
        ("parts", lambda: dist.all_gather_single(torch.ones(21), good)),
        ("parts", lambda: dist.reduce_scatter_single(good, torch.ones(21))),
        ("a list of 1 tensors", lambda: dist.group.WORLD.allgather([[good]], [good])),
        (
            "share one place",
            lambda: dist.all_reduce(torch.ones(1).expand(50_000)),
        ),
        ("share one place", lambda: dist.broadcast(torch.ones(1).expand(50_000), 0)),
        (
            "bytes to itself",
            lambda: dist.all_to_all_single(
                good.clone(), good, [3 + rank, 7 - rank], [4 + rank, 6 - rank]
            ),
        ),
        ("rows in parts", lambda: dist.all_to_all_single(good, good, [1, 2], [5, 5])),
    ):
        with pytest.raises(refused, match=match) as caught:
            call()
        assert f"rank {rank}/2" in str(caught.value)
        assert isinstance(caught.value, TypeError)
    # The group is as good as before.
    dist.all_reduce(good)
    assert (good == world).all()
    dist.destroy_process_group()
    return 14


def test_what_cannot_be_served_is_refused_and_harms_nothing() -> None:
    outcomes = run_ranks(rank_refusals, 2, CALM)
    assert [outcome.value for outcome in outcomes] == [14, 14], [str(o) for o in outcomes]


# ---- a group that can't be made ----


def rank_init(rank: int, world: int) -> str:
    init(timeout=float(os.environ.get("TEST_TIMEOUT", "30")))
    t = torch.ones(20_000)
    dist.all_reduce(t)
    assert (t == world).all()
    dist.destroy_process_group()
    return "good"


def _failed(outcomes: list[Outcome], *kinds: str) -> list[str]:
    for outcome, kind in zip(outcomes, kinds, strict=True):
        assert outcome.error == kind, str(outcome)
        assert outcome.seconds < 40
    return [outcome.text for outcome in outcomes]


def test_a_bad_option_on_one_rank_is_reported_on_all() -> None:
    # Without a launcher the store ends with rank 0: the others must have heard by then.
    bad = {1: {"LOSSYCOLL_REPAIR": "300"}}
    outcomes = run_ranks(rank_init, 3, QUIET, per_rank=bad, own_store=True)
    texts = _failed(outcomes, "RendezvousError", "OptionError", "RendezvousError")
    for text in texts:
        assert "variable LOSSYCOLL_REPAIR is 300, wanted 0 to 255" in text
    for rank in (0, 2):
        assert f"rank {rank}/3" in texts[rank]
        assert "rank 1 (" in texts[rank]


UNMAKEABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: what rank 1 asks for, the type of its error, what every rank's text has
    "value": ({"repair": 300}, "OptionError", "option repair is 300, wanted 0 to 255"),
    "name": ({"repairs": 1}, "OptionError", "unknown option repairs; did you mean repair?"),
    "inject": ({"inject": "loss=1.5"}, "OptionError", "loss is 1.5, wanted 0 to 1"),
    "link": (
        {"inject": "link=0-3:0.5"},
        "OptionError",
        "link=0-3:0.5 names rank 3, wanted ranks of the group, 0 to 2",
    ),
    "variable": ({"LOSSYCOLL_INJCET": "x"}, "OptionError", "did you mean LOSSYCOLL_INJECT?"),
    "differs": ({"repair": 2}, "RendezvousError", "option repair is 2 on rank 1 but 0 on rank 0"),
    "set": ({"repair": 0}, "RendezvousError", "option repair is 0 on rank 1 but not set on rank 0"),
    "version": (
        {"version": 1},
        "RendezvousError",
        f"version of lossycoll is {lossycoll.__version__} (wire 1)",
    ),
    "interface": (
        {"interface": "nosuch0"},
        "InterfaceError",
        "option interface is 'nosuch0', which is neither",
    ),
    "address": ({"interface": "198.51.100.7"}, "InterfaceError", "lo (127.0.0.1)"),
    "port": ({"port_range": "taken"}, "EngineError", "ddress already in use"),
    "type": ({"": None}, "OptionError", "pg_options is of type int"),
}


def take_low(taken: socket.socket) -> int:
    """Binds it to a port that no connection has by chance, TCP ports of the same number neither."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def rank_unmakeable(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    from lossycoll.runtime.engine.host import wire_version

    dist.init_process_group("gloo")
    out = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        port = take_low(taken)
        for name, (asked, _, _) in UNMAKEABLE.items():
            options: Any = {}
            wire = wire_version()
            if rank == 1:
                options = {k: v for k, v in asked.items() if not k.startswith("LOSSYCOLL_")}
                os.environ.update({k: v for k, v in asked.items() if k not in options})
                if "port_range" in options:
                    options["port_range"] = f"{port}-{port}"
                wire = options.pop("version", wire)
                if "" in options:
                    options = 3
            dist.barrier()
            begin = time.monotonic()
            try:
                with mock.patch.object(group_steps, "wire_version", return_value=wire):
                    dist.new_group(backend="lossy", pg_options=options)
                out[name] = ("", "", 0.0)
            except RuntimeError as error:
                out[name] = (type(error).__name__, str(error), time.monotonic() - begin)
            for key in [key for key in asked if key.startswith("LOSSYCOLL_")]:
                os.environ.pop(key, None)
    group = dist.new_group(backend="lossy", timeout=timedelta.max)
    t = torch.ones(20_000)
    dist.all_reduce(t, group=group)
    assert (t == world).all()
    dist.barrier()
    return out


def test_a_group_that_cannot_be_made_tells_every_rank_why() -> None:
    outcomes = run_ranks(rank_unmakeable, 3, CALM)
    for outcome in outcomes:
        assert outcome.value is not None, str(outcome)
        for name, (_, expected, part) in UNMAKEABLE.items():
            kind, text, seconds = outcome.value[name]
            where = f"{name} on rank {outcome.rank}: {kind} {text}"
            assert kind == (expected if outcome.rank == 1 else "RendezvousError"), where
            assert part in text, where
            assert f"rank {outcome.rank}/3: " in text, where
            assert seconds < 2 + SLACK, where


@pytest.mark.long
def test_a_master_whose_name_means_nothing() -> None:
    env = {**QUIET, "MASTER_ADDR": "no-such-host.invalid", "TEST_TIMEOUT": "3"}
    outcomes = run_ranks(rank_init, 2, env)
    for outcome in outcomes:
        assert outcome.error, str(outcome)
        assert "no-such-host.invalid" in outcome.stderr
        assert outcome.seconds < 60


def test_a_master_that_does_not_answer() -> None:
    with socket.socket() as taken:  # bound, so that nobody listens there
        taken.bind(("127.0.0.1", 0))
        env = {**QUIET, "TEST_TIMEOUT": "3", "MASTER_PORT": str(taken.getsockname()[1])}
        (outcome,) = run_ranks(rank_init, 2, env, ranks=[1], own_store=True)
    assert outcome.error in ("DistNetworkError", "DistStoreError"), str(outcome)
    assert outcome.seconds < 40


def test_missing_ranks_are_named_after_the_timeout() -> None:
    outcomes = run_ranks(rank_init, 4, {**QUIET, "TEST_TIMEOUT": "3"}, ranks=[0, 2])
    for text in _failed(outcomes, "RendezvousError", "RendezvousError"):
        assert "ranks 1, 3 are missing after 3 s" in text


def rank_stays(rank: int, world: int) -> str:
    note("here")
    until(lambda: os.path.exists(os.environ["GO"]), "the others", seconds=200)
    init(timeout=60)
    note("ready")
    until(lambda: os.path.exists(os.environ["STOP"]), "the end of the test", seconds=200)
    dist.destroy_process_group()
    return "good"


@pytest.mark.parametrize("doubled", [0, pytest.param(1, marks=pytest.mark.long)])
def test_two_processes_that_claim_a_rank(doubled: int, tmp_path: Any) -> None:
    env = {**QUIET, "GO": str(tmp_path / "go"), "STOP": str(tmp_path / "stop")}
    with Ranks(rank_stays, 2, env, ranks=[0, 1, doubled]) as ranks:
        # A process that starts later than rank 0 waits for latecomers is told nothing.
        until(
            lambda: all("here" in ranks.output(number) for number in range(3)),
            "all processes have started",
            seconds=60,
        )
        (tmp_path / "go").touch()
        # One is too many. Whoever comes late knows; the others do if it came in time.
        until(
            lambda: all(
                process.poll() is not None or "ready" in ranks.output(number)
                for number, process in enumerate(ranks.processes)
            ),
            "each rank has met the others, or failed",
            seconds=60,
        )
        (tmp_path / "stop").touch()
        outcomes = ranks.collect(100)
    reported = [outcome for outcome in outcomes if outcome.error]
    for outcome in reported:
        assert outcome.error == "RendezvousError", str(outcome)
        assert f"process claims rank {doubled}" in outcome.text, outcome.text
        assert "every process needs a RANK of its own" in outcome.text
        assert outcome.text.count(" pid ") >= 2, outcome.text
    # Either all got the error, or the two that met first continued.
    assert len(reported) in (1, 3), [str(outcome) for outcome in outcomes]
    assert any(outcome.rank == doubled for outcome in reported)


def rank_of_a_job_and_of_the_next(rank: int, world: int) -> str:
    gate = os.environ.get("GATE")
    if gate is not None:
        until(lambda: os.path.exists(gate), "the end of the job before", seconds=200)
    init(timeout=30)
    plane = WORLDS._worlds[0].plane
    note("ready at {} {} .".format(*plane.place_of(plane.rank)))
    if gate is None:
        signal.pause()  # until it is killed
    dist.destroy_process_group()
    return "good"


def test_a_restart_when_the_last_jobs_port_is_anothers(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    next_job = {number: {"GATE": str(gate)} for number in (2, 3)}
    with (
        Ranks(
            rank_of_a_job_and_of_the_next, 2, QUIET, ranks=[0, 1, 0, 1], per_rank=next_job
        ) as ranks,
        socket.socket() as other,
    ):
        for number in (0, 1):
            ranks.wait_for(number, " .\n")
        found = re.search(r"ready at (\S+) (\d+) \.", ranks.output(0))
        assert found is not None
        for number in (0, 1):
            ranks.signal(number, signal.SIGKILL)
            ranks.processes[number].wait()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((found[1], int(found[2])))
        other.listen()
        thread = threading.Thread(target=lambda: [other.accept()[0].close() for _ in range(2)])
        thread.start()
        gate.touch()
        for outcome in ranks.collect(100, but=[0, 1]):
            assert outcome.value == "good", str(outcome)
        thread.join(10)
        assert not thread.is_alive(), "both ranks were to ask"


def test_a_port_range_is_kept_to() -> None:
    port = free_port()
    env = {"LOSSYCOLL_PORT_RANGE": f"{port}-{min(port + 9, 65535)}"}
    for outcome in run_ranks(rank_init, 2, env):
        assert outcome.value == "good", str(outcome)
        used = int(outcome.stderr.split("127.0.0.1:")[1].split()[0])
        assert port <= used <= port + 9

"""Ranks that reach each other by RDMA, through a libibverbs of the tests' own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support import fake_rdma
from tests.support.harness import EXACT, Outcome, Ranks, init, kill_self, note, run_ranks

LOGS = {"LOSSYCOLL_LOG": "info", **EXACT}
EACH_A_HOST = {rank: {"LOSSYCOLL_HOST": f"h{rank}"} for rank in range(4)}


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    fake_rdma.drop_library()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    fake_rdma.write_port(tmp_path / "sys")
    return {**LOGS, **fake_rdma.environment(tmp_path / "sys")}


def rank_sums(rank: int, world: int) -> dict[str, Any]:
    """Collectives and messages, all exact; what the link sent, as the engine and the device say."""
    if os.environ.get("HAS_RDMA", "1") == "1":
        fake_rdma.show_devices()
    init(timeout=60)
    devices = fake_rdma.open_devices()
    for count in (1, 1000, 100_003):
        data = torch.arange(count, dtype=torch.float32) % 64 * (rank + 1)
        dist.all_reduce(data)
        want = torch.arange(count, dtype=torch.float32) % 64 * (world * (world + 1) // 2)
        assert torch.equal(data, want), count
        parts = [torch.zeros(count) for _ in range(world)]
        dist.all_gather(parts, torch.full((count,), float(rank)))
        assert [float(part[0]) for part in parts] == list(range(world))
    after, before = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(300_000)
    works = [dist.isend(torch.full((300_000,), float(rank)), after), dist.irecv(got, before)]
    for work in works:
        work.wait()
    assert (got == before).all()
    some = dist.new_group(list(range(2)), timeout=None)
    if rank < 2:
        one = torch.ones(5000)
        dist.all_reduce(one, group=some)
        assert (one == 2).all()
    stats = lossycoll.stats()
    dist.barrier()
    dist.destroy_process_group()
    assert fake_rdma.open_devices() == 0
    return {
        "devices": devices,
        "missing": stats.packets_missing,
        "odd": stats.malformed + stats.foreign,
        "sent": stats.packets_sent,
        "by_rdma": fake_rdma.sent(),
    }


def told(outcome: Outcome) -> str:
    """What a rank logged of RDMA, once."""
    found = [line for line in outcome.stderr.splitlines() if "event=rdma " in line]
    assert len(found) == 1, outcome.stderr
    return found[0]


def good(outcomes: list[Outcome]) -> list[Outcome]:
    for outcome in outcomes:
        assert not outcome.error, str(outcome)
        assert outcome.value["missing"] == outcome.value["odd"] == 0
        uses_it = re.search(r"event=rdma .* ranks=\d", outcome.stderr) is not None
        assert outcome.value["devices"] == uses_it
    return outcomes


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_all_by_rdma(env: dict[str, str], world: int) -> None:
    outcomes = good(run_ranks(rank_sums, world, env, per_rank=EACH_A_HOST))
    for outcome in outcomes:
        others = ",".join(str(rank) for rank in range(world) if rank != outcome.rank)
        line = told(outcome)
        assert "fake0:1, GID 1 (127.0.0.1, RoCE v2)" in line
        assert "mtu=4096" in line
        assert f"ranks={others}" in line
        # Larger than what an Ethernet carries: nothing goes by UDP.
        assert "payload=4032 " in outcome.stderr
        assert outcome.value["by_rdma"] >= outcome.value["sent"]


def with_(env: dict[str, str], **per_rank: dict[str, str]) -> dict[int, dict[str, str]]:
    """Each rank a host of its own, and what ``r0`` and so on say besides."""
    return {rank: {**EACH_A_HOST[rank], **per_rank.get(f"r{rank}", {})} for rank in EACH_A_HOST}


def test_one_without_goes_by_udp(env: dict[str, str]) -> None:
    """A group may mix; packets are as small as both kinds of link need."""
    without = {"HAS_RDMA": "0", "LOSSYCOLL_MTU": "1500"}
    outcomes = good(run_ranks(rank_sums, 3, env, per_rank=with_(env, r2=without)))
    for outcome in outcomes[:2]:
        assert f"ranks={1 - outcome.rank}" in told(outcome)
        assert "payload=1408 " in outcome.stderr
        assert 0 < outcome.value["by_rdma"] < outcome.value["sent"]
    assert outcomes[2].value["by_rdma"] == 0
    assert "event=rdma" not in outcomes[2].stderr


def test_one_alone_says_so(env: dict[str, str]) -> None:
    outcomes = good(run_ranks(rank_sums, 2, env, per_rank=with_(env, r1={"HAS_RDMA": "0"})))
    assert "no other rank has a port" in told(outcomes[0])
    assert "event=rdma" not in outcomes[1].stderr


@pytest.mark.parametrize("off", [{"LOSSYCOLL_LINK": "udp"}, {"LOSSYCOLL_DISABLE": "verbs"}])
def test_it_can_be_switched_off(env: dict[str, str], off: dict[str, str]) -> None:
    for outcome in good(run_ranks(rank_sums, 2, {**env, **off}, per_rank=EACH_A_HOST)):
        assert "event=rdma" not in outcome.stderr
        assert "payload=8896 " in outcome.stderr
        assert outcome.value["by_rdma"] == 0


def test_partitions_that_differ(env: dict[str, str]) -> None:
    other = {"FAKE_VERBS_PARTITION": str(0x8002)}
    outcomes = good(run_ranks(rank_sums, 2, env, per_rank=with_(env, r1=other)))
    for outcome in outcomes:
        line = told(outcome)
        assert f"ranks=none udp={1 - outcome.rank}" in line
        assert f"to ranks {1 - outcome.rank} by UDP, since no datagram of RDMA" in outcome.stderr
        assert f"this one's is {(0xFFFF, 0x8002)[outcome.rank]:#x}" in outcome.stderr


def test_partitions_that_are_one(env: dict[str, str]) -> None:
    """As the device has the number, its bytes are the other way round."""
    same = {"FAKE_VERBS_PARTITION": str(0x8001)}
    limited = {"FAKE_VERBS_PARTITION": str(0x0001)}
    for outcome in good(run_ranks(rank_sums, 2, env, per_rank=with_(env, r0=same, r1=limited))):
        assert f"ranks={1 - outcome.rank}" in told(outcome)


def test_a_network_that_carries_less(env: dict[str, str]) -> None:
    """Greetings are as large as packets: what isn't carried is found out before it is needed."""
    narrow = {**env, "FAKE_VERBS_CARRIES": "1500"}
    for outcome in good(run_ranks(rank_sums, 2, narrow, per_rank=EACH_A_HOST)):
        assert "no datagram of RDMA of 4096 bytes came through" in outcome.stderr
    lowered = {**narrow, "LOSSYCOLL_MTU": "1500"}
    for outcome in good(run_ranks(rank_sums, 2, lowered, per_rank=EACH_A_HOST)):
        assert "mtu=1500 queue=4096 ranks=" in told(outcome)
        assert "payload=1408 " in outcome.stderr
        assert outcome.value["by_rdma"] >= outcome.value["sent"]


def test_one_machine_has_its_memory(env: dict[str, str]) -> None:
    for outcome in good(run_ranks(rank_sums, 2, env)):
        assert "event=rdma" not in outcome.stderr
        assert outcome.value["by_rdma"] == 0


@pytest.mark.parametrize(
    ("port", "why"),
    [
        ({"state": "1: DOWN"}, "no port has a link: fake0:1 is DOWN (Ethernet)"),
        ({"gids": {0: ("fe80::1", "IB/RoCE v1", "lo")}}, "no GID of RoCE v2 with the address of"),
    ],
)
def test_why_a_port_is_not_used_is_said(
    env: dict[str, str], tmp_path: Path, port: dict[str, Any], why: str
) -> None:
    fake_rdma.write_port(tmp_path / "other", **port)
    other = {"FAKE_VERBS_SYSFS": str(tmp_path / "other")}
    first, second = good(run_ranks(rank_sums, 2, env, per_rank=with_(env, r1=other)))
    assert f"packets go by UDP, since RDMA can't be used: {why}" in second.stderr
    assert "no other rank has a port" in told(first)


def test_little_memory_may_be_locked(env: dict[str, str]) -> None:
    outcomes = good(
        run_ranks(rank_sums, 2, {**env, "FAKE_VERBS_LOCK": str(3 << 20)}, per_rank=EACH_A_HOST)
    )
    for outcome in outcomes:
        assert "queue=256 ranks=" in told(outcome)
        assert "only 256 of 4096 datagrams may wait at fake0:1" in outcome.stderr


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ({"FAKE_VERBS_OPEN": "13"}, "give this user /dev/infiniband/uverbs*"),
        ({"FAKE_VERBS_LOCK": "1000"}, "its buffers can't be locked"),
        ({"FAKE_VERBS_PORT": "1"}, "its port has no link"),
        ({"LOSSYCOLL_LIBIBVERBS": "/no/such/libibverbs.so"}, "there is no libibverbs: install"),
    ],
)
def test_a_port_that_cannot_be_opened(
    env: dict[str, str], fault: dict[str, str], remedy: str
) -> None:
    """By itself it is left out, with a line that says why; asked for, it is every rank's error."""
    outcomes = good(run_ranks(rank_sums, 2, env, per_rank=with_(env, r1=fault)))
    assert remedy in outcomes[1].stderr
    assert "event=rdma" not in outcomes[1].stderr
    asked = {**env, "LOSSYCOLL_VERBS_DEVICE": "fake0"}
    first, second = run_ranks(rank_sums, 2, asked, per_rank=with_(env, r1=fault))
    assert second.error == "EngineError", str(second)
    assert remedy in second.text
    assert first.error == "RendezvousError", str(first)
    assert remedy in first.text


def rank_loses(rank: int, world: int) -> dict[str, float]:
    """Sums of ones by lossy calls whose packets the device loses, then by reliable ones."""
    fake_rdma.show_devices()
    init(timeout=60)
    total, calls = 0.0, 30
    for _ in range(calls):
        data = torch.full((30_000,), float(rank))
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
        assert ((data >= 0) & (data <= world - 1)).all()
        total += float(data.mean())
    missing = lossycoll.stats().packets_missing
    with lossycoll.reliable():
        data = torch.arange(100_000, dtype=torch.float32) * (rank + 1)
        dist.all_reduce(data)
        assert torch.equal(data, torch.arange(100_000, dtype=torch.float32) * 3)
    dist.barrier()
    dist.destroy_process_group()
    return {"mean": total / calls, "missing": float(missing)}


def test_loss_on_the_way(env: dict[str, str]) -> None:
    """Unbiased: each rank misses the other's part as often."""
    lossy = {**env, "FAKE_VERBS_LOSS": "0.1", "LOSSYCOLL_REORDER_MIN": "0.001"}
    outcomes = run_ranks(rank_loses, 2, lossy, per_rank=EACH_A_HOST)
    for outcome in outcomes:
        assert not outcome.error, str(outcome)
        assert outcome.value["missing"] > 20, "the fault did not happen"
    mean = sum(outcome.value["mean"] for outcome in outcomes) / 2
    # 30 calls of 16 packets, of which a tenth is off by a half: some 0.015 of standard error.
    assert abs(mean - 0.5) < 0.06


def test_sealed(env: dict[str, str]) -> None:
    secret = {**env, "LOSSYCOLL_SECRET": "a secret of this test alone, long enough"}
    for outcome in good(run_ranks(rank_sums, 2, secret, per_rank=EACH_A_HOST)):
        assert "sealed=aes-128-gcm " in outcome.stderr
        assert "payload=4032 " in outcome.stderr


def rank_is_killed(rank: int, world: int) -> str:
    fake_rdma.show_devices()
    init(timeout=60)
    dist.barrier()
    note("begun")
    try:
        for i in range(100_000):
            if rank == 1 and i == 3:
                kill_self()
            dist.all_reduce(torch.ones(50_000))
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return "nobody died"


def test_a_killed_rank_is_named(env: dict[str, str]) -> None:
    with Ranks(rank_is_killed, 2, env, per_rank=EACH_A_HOST) as ranks:
        first, second = ranks.collect(60)
    assert second.code == -9, "the fault did not happen"
    assert first.value.startswith("PeerLostError"), str(first)
    assert "rank 1" in first.value

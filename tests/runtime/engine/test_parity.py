"""Parity packets: the engine brings back what the reference says, over every plan, and adapts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.plan import copies, draw_order, faults, hierarchical, packet_count
from lossycoll.plan.sets import NO_PARITY, Code, code_of
from lossycoll.runtime.engine.packet_masks import Blocks
from lossycoll.runtime.engine.payload import payload_bytes
from tests.oracle import masks, reference_executor
from tests.support.harness import init, run_good, run_ranks
from tests.support.network import GROUP, Network, elements
from tests.support.oracle_cases import PAYLOAD, lossy_cases
from tests.support.oracle_checks import assert_close, assert_report, check
from tests.support.oracle_packets import check_needed, check_reported_loss
from tests.support.waiting import until

C84: Final = Code(8, 4)
SINGLE, BURSTY, BAD = (
    "loss=0.1,seed=6",
    "loss=0.2,burst=3,link=0-1:0.4,seed=7",
    "loss=0.1,dup=0.05,reorder=0.1,seed=11",
)


@pytest.mark.parametrize(
    ("world", "loss", "code"),
    [
        (2, SINGLE, Code(64, 6)),
        (3, SINGLE, Code(3, 1)),
        (3, BURSTY, Code(16, 6)),
        (5, BURSTY, Code(1, 1)),
        (4, BAD, Code(8, 3)),
        (3, "", Code(4, 2)),
        (2, "loss=0.05,seed=9", Code(224, 1)),
    ],
)
def test_engine_equals_reference_with_parity(world: int, loss: str, code: Code) -> None:
    dropped, turn = 0, 0
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for case in lossy_cases(world):
            types = ("f32", "bf16") if case.sums else ("bytes", "f64")
            for repair in (0, 1):
                turn += 1
                dtype = types[turn % 2]
                per_packet = PAYLOAD // {"bytes": 1, "bf16": 2, "f32": 4, "f64": 8}[dtype]
                for count in (1, world * per_packet + 3, 37 * per_packet + 5):
                    dropped += check(network, case, count, dtype, loss, repair=repair, code=code)
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.malformed + s.foreign + s.socket_overflow for s in stats) == 0
    assert sum(s.parity_sent for s in stats) > 0
    assert (dropped > 0) == (sum(s.packets_recovered for s in stats) > 0) == bool(loss)
    if not loss:
        assert sum(s.stale + s.repeated + s.packets_missing for s in stats) == 0


def test_the_same_packets_are_lost_with_parity_and_without() -> None:
    """So what is missing with it is a part of what is missing without, of every operation."""
    missing, packets = {}, 400
    own = np.ones(packets * PAYLOAD, np.uint8)
    for code in (NO_PARITY, Code(4, 1)):
        with Network(2, PAYLOAD, inject=SINGLE) as network:
            plans = [copies.all_gather(2, r, own.size, PAYLOAD) for r in range(2)]
            blocks = [Blocks(plans[r], [own.size] * 2, PAYLOAD) for r in range(2)]
            data = [(own, np.zeros(2 * own.size, np.uint8)) for _ in range(2)]
            tickets = [network.submit(r, plans[r], data[r], "bytes", code=code) for r in range(2)]
            for r in range(2):
                network.end(r, tickets[r], note=partial(blocks[r].note, network.engines[r]))
            missing[code.rows] = [~blocks[r].arrived for r in range(2)]
    for without, with_parity in zip(missing[0], missing[1], strict=True):
        assert (with_parity <= without).all()
        assert 0 < 2 * with_parity.sum() < without.sum()


@pytest.mark.parametrize("mtu", [9000, 60_000, 65_100, 65_535])
def test_parity_brings_back_packets_of_any_accepted_mtu(mtu: int) -> None:
    payload, packets, loss = payload_bytes(mtu, 4), 24, "loss=0.2,seed=3"
    own = np.ones(packets * payload, np.uint8)
    with Network(2, payload, inject=loss) as network:
        plans = [copies.all_gather(2, r, own.size, payload) for r in range(2)]
        out = [np.zeros(2 * own.size, np.uint8) for _ in range(2)]
        tickets = [network.submit(r, plans[r], (own, out[r]), "bytes", code=C84) for r in range(2)]
        reports = [network.end(r, tickets[r]).report for r in range(2)]
    for r in range(2):
        assert reports[r].packets_injected > reports[r].packets_recovered > 0
        assert int(out[r].sum()) == (2 * packets - reports[r].packets_missing) * payload


@pytest.mark.parametrize("repair", [0, 1])
def test_what_is_needed_comes_and_brings_others_back(repair: int) -> None:
    count, loss = 60 * PAYLOAD - 9, "loss=0.4,seed=13"
    with Network(3, PAYLOAD, inject=loss) as network:
        for _ in range(4):
            ended, needed = check_needed(network, count, loss, 0.5, repair=repair, code=Code(4, 2))
            assert needed > 0
            assert all(one.report.packets_recovered > 0 for one in ended)


def test_senders_learn_what_parity_could_not_bring_back() -> None:
    reported, recovered = 0, 0
    count = 90 * PAYLOAD // 4 + 3
    with Network(3, PAYLOAD, inject=BURSTY) as network:
        for _ in range(4):
            ended, gone = check_reported_loss(network, count, BURSTY, code=Code(24, 5))
            recovered += sum(one.report.packets_recovered for one in ended)
            reported += gone
    assert reported > 0
    assert recovered > 0


@pytest.mark.parametrize(
    ("repair", "max_missing", "loss"),
    [
        (0, 0.01, BURSTY),
        (1, 0.003, BAD),
        (None, 0.003, BAD),
        (None, 0.01, BURSTY),
        (0, 0.0, SINGLE),
    ],
)
def test_what_is_chosen_brings_back_what_the_reference_says(
    repair: int | None, max_missing: float, loss: str
) -> None:
    """Each stream has the code that its sender has chosen, and, without ``repair``, the rounds."""
    count, seen, recovered = 200 * PAYLOAD // 4, set(), 0
    rng = np.random.default_rng(3)
    only_rounds = (repair, loss) == (None, BAD)
    how: dict[str, Any] = {"most_parity": 0 if only_rounds else 64, "max_missing": max_missing}
    how |= {"choose_rounds": True} if repair is None else {"repair": repair}
    with Network(3, PAYLOAD, inject=loss) as network:
        for op in range(8):
            plans = [hierarchical.all_reduce(3, r, count, PAYLOAD // 4) for r in range(3)]
            data = [elements("f32", count, rng) for _ in range(3)]
            want_out = [array.copy() for array in data]
            means: dict[tuple[int, int, int], tuple[Code, int]] = {}

            def note(rank: int, ticket: int, means: dict[Any, Any] = means) -> None:
                for stream in network.engines[rank].streams(ticket):
                    means[stream.peer, rank, stream.slot] = (code_of(stream.code), stream.rounds)

            tickets = [
                network.submit(r, plans[r], (data[r], data[r]), "f32", 3.0, **how) for r in range(3)
            ]
            ended = [network.end(r, tickets[r], note=partial(note, r)) for r in range(3)]
            want = reference_executor.execute(
                plans,
                [array.copy() for array in want_out],
                want_out,
                "f32",
                3.0,
                partial(masks.lost, faults.parse(loss), GROUP, op),
                0,
                chosen=lambda sender, receiver, slot, means=means: means[sender, receiver, slot],
            )
            for r in range(3):
                assert_report(ended[r], want[r], plans[r], f"rank {r}, operation {op}, {means}")
                assert_close(data[r], want_out[r], "f32", f"rank {r}, operation {op}, {means}")
                recovered += ended[r].report.packets_recovered
                assert ended[r].report.max_missing == pytest.approx(max_missing)
            seen |= set(means.values())

        def is_shown(sender: int, receiver: int) -> bool:
            found = network.engines[sender].peer_stats(receiver)
            latest = [chosen for at, chosen in means.items() if at[:2] == (sender, receiver)]
            return found.max_missing == pytest.approx(max_missing) and (
                (code_of(found.code), found.rounds) in latest
            )

        for sender, receiver in itertools.permutations(range(3), 2):
            until(lambda way=(sender, receiver): is_shown(*way))  # type: ignore[misc]
    assert len(seen) > 1
    assert max(code.rows + 2 * rounds for code, rounds in seen) > 2
    assert (recovered > 0) != only_rounds


def test_more_loss_than_can_be_brought_back_is_reported() -> None:
    count = 200 * PAYLOAD // 4
    with Network(2, PAYLOAD, inject="loss=0.5,seed=12") as network:
        for _ in range(6):
            plans = [hierarchical.all_reduce(2, r, count, PAYLOAD // 4) for r in range(2)]
            data = [np.full(count, float(r + 1), np.float32) for r in range(2)]
            how: dict[str, Any] = {"most_parity": 16, "max_missing": 0.01}
            ended = network.run(plans, data, data, "f32", 2.0, **how)
        for rank, one in enumerate(ended):
            report = one.report
            assert one.code == 0
            assert report.packets_injected > 50, "the fault did not happen"
            assert 0.3 < report.missing_share < 0.7
            assert report.beyond_max_missing == pytest.approx(report.missing_share - 0.01)
            until(lambda at=rank: network.engines[at].peer_stats(1 - at).expected_missing > 0.05)  # type: ignore[misc]


# ---- auto ----


COUNT: Final = 60_000
STREAM: Final = packet_count(COUNT // 2, PAYLOAD // 4)
"""Packets of a stream of the next function."""
QUARTER: Final = packet_count(STREAM, 4) / STREAM
"""The most parity that sets of 4 make; the last set has fewer packets."""


def share_and_loss(loss: str, operations: int, warm: int) -> tuple[list[float], list[float]]:
    """By rank: parity over the other packets sent, and the share missing, once it has settled."""
    with Network(2, PAYLOAD, inject=loss) as network:
        before = None
        for op in range(operations):
            plans = [hierarchical.all_reduce(2, r, COUNT, PAYLOAD // 4) for r in range(2)]
            data = [np.full(COUNT, float(r + 1), np.float32) for r in range(2)]
            for ended in network.run(plans, data, data, "f32", 2.0, most_parity=16):
                assert ended.code == 0
            if op == warm - 1:
                before = [engine.stats() for engine in network.engines]
        after = [engine.stats() for engine in network.engines]
    assert before is not None
    shares, missing = [], []
    for a, b in zip(before, after, strict=True):
        parity_sent = b.parity_sent - a.parity_sent
        shares.append(parity_sent / (b.packets_sent - a.packets_sent - parity_sent))
        gone = b.packets_missing - a.packets_missing
        missing.append(gone / (gone + b.packets_received - a.packets_received))
    return shares, missing


def test_auto_sends_no_parity_where_nothing_is_lost() -> None:
    shares, missing = share_and_loss("", 20, 1)
    assert shares == missing == [0, 0]


def test_auto_follows_the_loss_of_each_path() -> None:
    """2% is lost from rank 0 to rank 1 and nothing the other way, where no parity goes."""
    shares, missing = share_and_loss("link=0-1:0.02,seed=3", 40, 15)
    assert 0.02 < shares[0] <= QUARTER
    assert shares[1] == 0
    assert missing[0] == 0
    assert missing[1] < 0.2 * 0.02


def test_auto_spends_no_more_than_a_quarter() -> None:
    shares, missing = share_and_loss("loss=0.15,burst=2,seed=4", 20, 10)
    for share, gone in zip(shares, missing, strict=True):
        assert 0.15 < share < 0.26
        assert 0.005 < gone < 0.1


@pytest.mark.parametrize("owners", [1, 2])
def test_few_owners_equal_the_reference_too(owners: int) -> None:
    """Ranks without a part of their own send, and take the means."""
    world, count, dropped = 4, 40 * PAYLOAD // 4, 0
    code, loss = Code(64, 25), "loss=0.2,burst=8,seed=7"
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for op in range(6):
            order = draw_order(11, GROUP, op, world)[:owners]
            plans = [
                hierarchical.all_reduce(world, rank, count, PAYLOAD // 4, order=order)
                for rank in range(world)
            ]
            got = [elements("f32", count, np.random.default_rng(rank)) for rank in range(world)]
            want = [array.copy() for array in got]
            ended = network.run(plans, got, got, "f32", code=code)
            lost = partial(masks.lost, faults.parse(loss), GROUP, op)
            said = reference_executor.execute(plans, want, want, "f32", 1.0, lost, 0, code=code)
            for rank in range(world):
                name = f"op={op} rank={rank} owners={order}"
                assert ended[rank].code == 0, (name, ended[rank].failure)
                assert_close(got[rank], want[rank], "f32", name)
                assert_report(ended[rank], said[rank], plans[rank], name)
            dropped += sum(e.report.packets_injected for e in ended)
            recovered = sum(e.report.packets_recovered for e in ended)
            assert recovered > 0
    assert dropped > 0


# ---- through torch ----


def blocks_and_figures(rank: int, world: int) -> None:
    init()
    big = torch.ones(300_000)
    dist.all_reduce(big)
    report = lossycoll.last_report()
    assert report.parity_sent > 0
    assert report.packets_recovered > 0
    with lossycoll.lossy(fec=0):
        dist.all_reduce(big)
        assert lossycoll.last_report().parity_sent == 0
    with lossycoll.lossy(fec="auto"):
        for _ in range(3):
            dist.broadcast(big, 0)
    with lossycoll.lossy(max_missing=0.0):  # fec was given
        dist.all_reduce(big)
        assert lossycoll.last_report().parity_sent == report.parity_sent
    with lossycoll.reliable():
        dist.all_reduce(big)
        assert lossycoll.last_report().parity_sent == 0
    stats = lossycoll.stats()
    assert stats.parity_sent >= report.parity_sent
    assert stats.parity_received > 0
    assert lossycoll.group_stats()[rank]["packets_recovered"] == stats.packets_recovered > 0
    dist.destroy_process_group()


def gone_by_stream_packets(rank: int, world: int) -> dict[int, float]:
    """By the option ``stream_packets``: the share of the packets that stays missing. 193 packets,
    of which 24 or 193 are a stream."""
    init(pg_options={"max_missing": 0.01, "repair": 0})
    found, calls = {}, 20
    for wanted in (0, 256):
        with lossycoll.lossy(stream_packets=wanted, finer_packets=1):
            before = lossycoll.stats()
            for _ in range(calls):
                dist.all_reduce(torch.ones(68_000))
            after = lossycoll.stats()
        assert after.packets_resent == before.packets_resent
        packets = 2 * (world - 1) * 193 / world
        found[wanted] = (after.packets_missing - before.packets_missing) / (calls * packets)
    dist.destroy_process_group()
    return found


def reduced(collective: str, given: torch.Tensor, world: int) -> torch.Tensor:
    out = given.clone()
    if collective == "all_reduce":
        dist.all_reduce(out)
        return out
    part = torch.empty(len(out) // world)
    dist.reduce_scatter_single(part, out)
    return part


def gone_by_packet_size(rank: int, world: int) -> dict[tuple[str, int], tuple[float, float]]:
    """By collective and ``finer_packets``: the share of the packets that stays missing, and bytes
    sent. Packets of usual size are 193."""
    init(pg_options={"max_missing": 0.01, "repair": 0})
    found, calls, given = {}, 12, torch.full((68_000,), rank + 1.0)
    for collective, finer in itertools.product(("all_reduce", "reduce_scatter"), (1, 3)):
        call = partial(reduced, collective, given, world)
        with lossycoll.lossy(finer_packets=finer):
            for _ in range(4):
                call()  # the first calls have no parity yet
            before = lossycoll.stats()
            values = [call() for _ in range(calls)]
            after = lossycoll.stats()
        assert after.packets_resent == before.packets_resent
        if not lossycoll.stats().packets_injected:
            assert all(bool((value == sum(range(1, world + 1))).all()) for value in values)
        per_packet = 352 if finer == 1 else 128
        chunk = 68_000 if collective == "all_reduce" else 17_000
        packets = (2 if chunk == 68_000 else 4) * (world - 1) / world * -(-chunk // per_packet)
        gone = (after.packets_missing - before.packets_missing) / (calls * packets)
        found[collective, finer] = gone, float(after.bytes_sent - before.bytes_sent)
    dist.destroy_process_group()
    return found


def unlike_blocks(rank: int, world: int) -> None:
    init(timeout=20)
    with lossycoll.lossy(fec=0.1 if rank else 0.2):
        dist.all_reduce(torch.ones(100_000))


def unlike_dials(rank: int, world: int) -> None:
    init(timeout=20)
    with lossycoll.lossy(max_missing=0.01 if rank else 0.02):
        dist.all_reduce(torch.ones(100_000))


def test_option_and_blocks() -> None:
    run_good(
        blocks_and_figures,
        2,
        {"LOSSYCOLL_FEC": "0.2", "LOSSYCOLL_INJECT": "loss=0.1,seed=2", "LOSSYCOLL_MTU": "1500"},
    )


def test_ranks_must_agree() -> None:
    for work in (unlike_blocks, unlike_dials):
        for outcome in run_ranks(work, 2):
            assert outcome.error == "MismatchError", str(outcome)
    for outcome in run_ranks(unlike_blocks, 2, per_rank={0: {"LOSSYCOLL_FEC": "0.05"}}):
        assert outcome.error == "RendezvousError", str(outcome)
        assert "fec" in outcome.text


def test_bursts_take_less_of_short_calls_that_have_few_owners() -> None:
    env = {"LOSSYCOLL_INJECT": "loss=0.2,burst=8,seed=2", "LOSSYCOLL_MTU": "1500"}
    found = run_good(gone_by_stream_packets, 4, env)
    short, long = (np.mean([one[wanted] for one in found]) for wanted in (0, 256))
    # Predicted: 7.5% and 1.5%. The first calls have no parity yet.
    assert short > 0.04
    assert long < 0.6 * short


def test_bursts_take_less_of_short_calls_whose_packets_are_smaller() -> None:
    env = {"LOSSYCOLL_INJECT": "loss=0.4,burst=8,seed=2", "LOSSYCOLL_MTU": "1500"}
    found = run_good(gone_by_packet_size, 4, env)
    # Predicted: 4.9% and 1%; 13% and 6.8%. Bytes: 2.0 and 2.1 for each of the data's.
    for collective, gain in (("all_reduce", 0.55), ("reduce_scatter", 0.75)):
        whole, smaller = (
            np.mean([one[collective, finer] for one in found], axis=0) for finer in (1, 3)
        )
        assert whole[0] > 0.02
        assert smaller[0] < gain * whole[0], (collective, whole, smaller)
        assert smaller[1] < 1.15 * whole[1]


def test_smaller_packets_change_nothing_without_loss() -> None:
    run_good(gone_by_packet_size, 4, {"LOSSYCOLL_MTU": "1500"})

"""The study of large models: its collectives are the engine's, to the bit, and a small one runs."""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.results import Result
from benchmarks.common.runner import PieceFailed
from benchmarks.studies.large import study
from benchmarks.studies.large.exchange import Exchange
from benchmarks.studies.large.replicas import Replicas
from lossycoll.options.fields import Options
from lossycoll.plan import (
    Plan,
    copies,
    default_algorithm,
    draw_order,
    hierarchical,
    owner_count,
    packet_count,
)
from lossycoll.plan import reduce_scatter as scatters
from lossycoll.plan.faults import parse
from lossycoll.plan.order import FINER_PACKETS
from lossycoll.plan.sets import NO_PARITY, Code
from lossycoll.runtime.collectives import plan_cache
from tests.oracle.parity import fitted
from tests.support.network import GROUP, Network

PAYLOAD, PER_PACKET, STREAM_PACKETS = 192, 48, 20
LOSSES = ("", "loss=0.2,seed=3", "loss=0.3,burst=5,seed=4")


def size_of(collective: str, count: int, owners: int, per_packet: int = PER_PACKET) -> int:
    """Elements of the engine's packets in a call whose packets are cut."""
    options = Options(max_missing=0.01, repair=0, stream_packets=STREAM_PACKETS)
    by = default_algorithm(collective)
    return plan_cache.finer(by, count, owners, per_packet, options)


def plans_of(collective: str, world: int, count: int, op: int) -> list[Plan]:
    if collective == "reduce_scatter":
        size = size_of(collective, count, world)
        return [scatters.reduce_scatter(world, rank, count, size) for rank in range(world)]
    if collective == "all_gather":
        # Gathered blocks are counted in bytes.
        size = size_of(collective, 4 * count, world, 4 * PER_PACKET) // 4
        return [copies.all_gather(world, rank, count, size) for rank in range(world)]
    owners = owner_count(world, packet_count(count, PER_PACKET), STREAM_PACKETS)
    order = draw_order(7, GROUP, op, world)[:owners]
    size = size_of(collective, count, owners)
    return [hierarchical.all_reduce(world, rank, count, size, order=order) for rank in range(world)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("code", "repair"), [(NO_PARITY, 0), (Code(8, 3), 0), (Code(8, 3), 1)])
@pytest.mark.parametrize("world", [2, 5])
def test_collectives_are_the_engines_to_the_bit(
    world: int, code: Code, repair: int, loss: str
) -> None:
    """Values of every magnitude, whose sum depends on the order."""
    exchange = Exchange(
        *(world, parse(loss), PAYLOAD),
        code=partial(fitted, code),
        rounds=repair,
        order_seed=7,
        group=GROUP,
        stream_packets=STREAM_PACKETS,
        finer_packets=FINER_PACKETS,
    )
    dropped, rng = 0, np.random.default_rng(5)
    how: dict[str, Any] = {"code": code, "repair": repair, "deterministic": True}
    with Network(world, PAYLOAD, inject=loss) as network:
        for count in (37 * PER_PACKET + 5, 90 * PER_PACKET, PER_PACKET - 1):
            for collective in ("all_reduce", "reduce_scatter", "all_gather"):
                plans = plans_of(collective, world, count, network.op)
                given = [
                    (rng.standard_normal(p.in_elements) * 2.0 ** rng.integers(-9, 9)).astype("f4")
                    for p in plans
                ]
                got = [rng.standard_normal(p.out_elements).astype("f4") for p in plans]
                if collective == "all_reduce":
                    got = given
                elif collective == "all_gather":
                    for rank in range(world):
                        given[rank] = got[rank][rank * count :][:count].copy()
                mine = [torch.from_numpy(array.copy()) for array in got]
                whole = [torch.from_numpy(array.copy()) for array in given]
                if collective == "reduce_scatter":
                    exchange.reduce_scatter(whole, mine)
                elif collective == "all_gather":
                    exchange.all_gather(mine, [count] * world, finer=True)
                else:
                    exchange.all_reduce(mine)
                ended = network.run(plans, given, got, "f32", **how)
                dropped += sum(one.report.packets_injected for one in ended)
                for rank in range(world):
                    np.testing.assert_array_equal(
                        mine[rank].numpy().view("u4"),
                        got[rank].view("u4"),
                        f"{collective} {count} rank={rank}",
                    )
    assert (dropped > 0) == bool(loss)
    assert (exchange.traffic.missing > 0) == bool(loss)
    assert (exchange.traffic.parity > 0) == bool(code.rows)


def test_streams_of_ten_million_parameters_are_long() -> None:
    """So the engine doesn't cut their packets, and all ranks are owners."""
    size = study.SIZES["10m"]

    def make() -> study.ByteGPT:
        with torch.device("meta"):
            return study.ByteGPT(size.layers, size.width, size.context)

    exchange = study.exchange_of(study.Row("10m", "ddp", 0.2, 8.0, 1))
    mib = int(size.bucket_mib * (1 << 20))
    replicas = Replicas("ddp", make, torch.optim.AdamW, exchange, mib // 4, torch.device("meta"))
    cut = study.exchange_of(study.Row("10m", "sharded", 0.2, 8.0, 1))
    for begin, end in replicas.buckets:
        per_packet = size.payload // 4
        assert cut.size_for((end - begin) // study.WORLD) == per_packet
        packets = packet_count(end - begin, per_packet)
        assert owner_count(study.WORLD, packets, study.STREAM_PACKETS) == study.WORLD


SMALL = study.Size(1, 32, 16, 8, 4, 4e-3, 512, 0.05, 8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT of 21,000 parameters, of text that says nothing."""
    text = torch.randint(
        256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    corpus = study.demo_data.Corpus(text, text[:1000], 1, 1)
    monkeypatch.setattr(study, "SIZES", {"small": SMALL})
    monkeypatch.setattr(study.demo_data, "load", lambda seed: corpus)


def trained(method: str, loss: float = 0.3, burst: float = 4.0) -> study.Training:
    training = study.Training(study.Row("small", method, loss, burst, 1), torch.device("cpu"))
    assert training.run(math.inf)
    return training


@pytest.mark.usefixtures("small")
def test_methods_lose_packets_and_keep_replicas_together_as_they_should() -> None:
    reliable = trained("reliable", 0.0, 1.0)
    flats = reliable.replicas.flats
    assert all(torch.equal(flat, flats[0]) for flat in flats)
    assert len(reliable.replicas.buckets) > 1
    found = {method: trained(method).figures() for method in study.METHODS[1:]}
    assert 0.25 < found["ddp"]["missing"] < 0.35
    assert 0 < found["ddp+driftbound"]["missing"] < 0.2 < found["ddp+driftbound"]["parity"]
    assert found["ddp"]["parity"] == 0
    assert 0 < found["sharded"]["drift"] < found["ddp"]["drift"]
    assert 0 < found["ddp+driftbound"]["drift"] < found["ddp"]["drift"]


@pytest.mark.usefixtures("small")
def test_nothing_lost_is_training_of_one_model_by_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all methods, to rounding of float32."""
    monkeypatch.setattr(torch, "autocast", lambda *_: nullcontext())
    ours = [trained(method, 0.0, 1.0).replicas.flats[3] for method in study.METHODS]
    torch.manual_seed(1)
    model = study.ByteGPT(SMALL.layers, SMALL.width, SMALL.context)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.Generator().manual_seed(10_007)
    text = study.demo_data.load(seed=7).train
    for step in range(SMALL.steps):
        inputs, targets = study.demo_data.draw(text, SMALL.batch, SMALL.context, batches)
        optimizer.param_groups[0]["lr"] = study.rate_at(SMALL, step)
        optimizer.zero_grad()
        study.next_byte_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    alone = torch.cat([p.detach().flatten() for p in reversed(list(model.parameters()))])
    for flat in ours:
        torch.testing.assert_close(flat[: len(alone)], alone, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", ["ddp+driftbound", "sharded"])
def test_a_row_that_is_interrupted_goes_on_to_the_same_end(method: str, tmp_path: Path) -> None:
    row = study.Row("small", method, 0.3, 4.0, 1)
    options = argparse.Namespace(
        device="cpu", threads=0, row_minutes=1e-9, checkpoints=tmp_path / "kept"
    )
    whole = trained(method).figures()
    with pytest.raises(PieceFailed, match="0 of 4 steps are done"):
        study.train(row, options)
    half = study.Training(row, torch.device("cpu"))
    half.size = replace(SMALL, steps=2)
    rate = study.rate_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "rate_at", lambda _, step: rate(SMALL, step))
        assert half.run(math.inf)
    (kept,) = options.checkpoints.iterdir()
    half.save(kept)
    options.row_minutes = 0
    resumed = study.train(row, options)
    assert not kept.exists()
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


def test_rows_are_reported_against_their_base(tmp_path: Path) -> None:
    figures = {"parameters": 68_000, "missing": 0.012, "parity": 0.5, "drift": 0.001, "loss": 2.0}
    planned = list(study.rows(["tiny"], 1))
    assert len(planned) == len({row.key for row in planned}) == 1 + 3 * 2 * 3
    worse = next(row for row in planned if row.method == "sharded" and row.burst > 1)
    results = [
        Result(worse.base.settings, figures),
        Result(worse.settings, {**figures, "loss": 2.01}),
    ]
    page = tmp_path / "quality.md"
    page.write_text("<!-- large: begin -->\n<!-- large: end -->\n")
    study.report(results, tmp_path)
    line = page.read_text().splitlines()[5]
    assert "| tiny | 0.068 M | sharded | 1 | 20%, bursts of 8 | 2.0100 | +1.01% | 1.2% |" in line
    assert (tmp_path / "large.json").exists()

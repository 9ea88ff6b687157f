"""Encoded packets: over every plan the engine's result is the reference's, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lossycoll.errors import LossyError
from lossycoll.plan import copies, hierarchical, ring
from lossycoll.plan.codec import LOW, elements_of, named
from lossycoll.plan.sets import Code
from tests.oracle.codec import Array, Codec, codec_of
from tests.support.floats import floats
from tests.support.network import Network
from tests.support.oracle_cases import CASES, PAYLOAD, lossy_cases, sizes
from tests.support.oracle_checks import check, rounded_elements, sums_exactly
from tests.support.sampling import pairs, some

NARROW = ("bf16", "fp16")
AT_RANDOM = tuple(
    named(*how, "stochastic")
    for how in (("int8", 128, 0), ("int4", 32, 0), ("int3", 32, 1), ("int2", 128, 0))
)
PAIRS = (named("int4/int8", 32), named("int8/int3", 128), named("int2/int5", 32, 1, "stochastic"))
"""Of contributions and of means."""
ENCODED = (
    *NARROW,
    *LOW,
    *(named(name, 32, spikes=1) for name in tuple(LOW)[1:]),
    *AT_RANDOM,
)
ALL = (*ENCODED, *PAIRS)
"""Not a divisor of anything else that goes around in the first test: 19."""
MIXED = "loss=0.1,dup=0.05,reorder=0.1,seed=11"
LOSSES = (
    "",
    "loss=0.1,seed=6",
    "loss=0.5,burst=3,seed=10",
    MIXED,
    "loss=0.2,burst=3,link=0-1:0.6,link=1-0:0,seed=12",
)


def _is_short(world: int, loss: str) -> bool:
    return (loss == MIXED and world <= 3) or (world == 3 and "link" in loss)


@pytest.mark.parametrize(
    ("world", "loss"),
    [
        pytest.param(world, loss, marks=() if _is_short(world, loss) else pytest.mark.long)
        for world, loss in product((1, 2, 3, 5), LOSSES)
    ],
)
def test_engine_equals_reference_with_encodings(world: int, loss: str) -> None:
    if world == 1 and "link" in loss:
        return
    dropped, turn = 0, LOSSES.index(loss)
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for case in lossy_cases(world):
            for size in range(len(sizes(world, 9))):
                turn += 1
                encoding = ALL[turn % len(ALL)]
                if not sums_exactly(case, world, encoding):
                    encoding = "int5/32"
                count = sizes(world, elements_of(encoding, "f32", PAYLOAD))[size]
                how = {"repair": turn // 2 % 2, "code": Code(8, 2) if turn % 3 == 0 else Code()}
                dropped += check(network, case, count, "f32", loss, encoding=encoding, **how)
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.malformed + s.foreign + s.socket_overflow for s in stats) == 0
    if loss and world > 1:
        assert dropped > 0, "the fault did not happen"
        assert sum(s.packets_resent for s in stats) > 0
        assert sum(s.packets_recovered for s in stats) > 0


def _each_with_and_without_loss() -> Iterator[Any]:
    """The short suite has every eighth of those that lose nothing, every third of the others."""
    for at, encoding in enumerate(ALL):
        yield pytest.param("", encoding, marks=pytest.mark.long if at % 8 else ())
        yield pytest.param("loss=0.2,seed=3", encoding, marks=pytest.mark.long if at % 3 else ())


@pytest.mark.parametrize(("loss", "encoding"), list(_each_with_and_without_loss()))
def test_reliable_delivers_everything_encoded(loss: str, encoding: str) -> None:
    dropped = 0
    with Network(3, PAYLOAD, inject=loss) as network:
        for case in (case for case in CASES if not case.barrier):
            if not sums_exactly(case, 3, encoding):
                continue
            for count in (1, elements_of(encoding, "f32", PAYLOAD) + 1, 2000):
                dropped += check(
                    network, case, count, "f32", loss, encoding=encoding, reliable=True
                )
    assert (dropped > 0) == bool(loss)


@pytest.mark.parametrize(
    ("build", "encoding"), list(pairs([hierarchical.all_reduce, ring.all_reduce], ENCODED, 3))
)
def test_replicas_are_equal_and_packets_fewer(build: object, encoding: str) -> None:
    world, count = 3, 3 * 128 * 40
    most = {"bf16": 0.05, "fp16": 0.05} | {name: 8 / 2 ** LOW[name] for name in LOW}
    sent = {}
    for how in ("same", encoding):
        rng = np.random.default_rng(5)
        per_packet = codec_of(how, "f32").elements(PAYLOAD)
        data = [rng.standard_normal(count).astype(np.float32) for _ in range(world)]
        exact = np.mean(data, axis=0)
        with Network(world, PAYLOAD) as network:
            plans = [build(world, r, count, per_packet) for r in range(world)]  # type: ignore[operator]
            network.run(plans, data, data, "f32", reliable=True, encoding=how)
            sent[how] = sum(engine.stats().packets_sent for engine in network.engines)
        for replica in data[1:]:
            np.testing.assert_array_equal(replica.view(np.uint32), data[0].view(np.uint32))
        error = float(np.abs(data[0] - exact).max())
        if how == "same":
            assert error < 1e-6
        else:
            made = codec_of(how, "f32")
            assert 1e-4 < error < most[how[:4]] * (2 if is_stochastic(made) else 1)
            np.testing.assert_array_equal(made.decode(made.encode(data[0]), count), data[0])
    fits = {how: codec_of(how, "f32").elements(PAYLOAD) for how in sent}
    assert sent[encoding] == pytest.approx(sent["same"] * fits["same"] / fits[encoding], rel=0.1)


def test_contributions_and_means_may_be_encoded_apart() -> None:
    """int4/int8: contributions in int4, means in int8. What is added is that of int4."""
    world, count, errors = 3, 3 * 128 * 40, {}
    for how in ("int4", "int8", named("int4/int8", 128), named("int8/int4", 128)):
        rng = np.random.default_rng(5)
        # Of one size: then the means' grid is as fine as the contributions'.
        data = [rng.uniform(-1, 1, count).astype(np.float32) for _ in range(world)]
        exact = np.mean(data, axis=0)
        with Network(world, PAYLOAD) as network:
            per_packet = elements_of(how, "f32", PAYLOAD)
            plans = [hierarchical.all_reduce(world, r, count, per_packet) for r in range(world)]
            network.run(plans, data, data, "f32", reliable=True, encoding=how)
        for replica in data[1:]:
            np.testing.assert_array_equal(replica.view(np.uint32), data[0].view(np.uint32))
        errors[how] = float(np.square(data[0] - exact).mean())
    both = errors["int4:int8"]
    assert errors["int8"] * 20 < both < 0.6 * errors["int4"]
    # A mean holds two encoded contributions of three, so it is rounded by 2/9 of what one is.
    assert both == pytest.approx(errors["int4"] - errors["int8:int4"], rel=0.15)


def is_stochastic(made: Codec) -> bool:
    return made.low is not None and made.low.stochastic


@pytest.mark.parametrize("encoding", ENCODED[: -len(AT_RANDOM)])
def test_owners_keep_what_they_send(encoding: str) -> None:
    """Floats of all kinds, gathered and broadcast: what the twin makes of them, everywhere."""
    made, world = codec_of(encoding, "f32"), 3
    x = floats()[-40_064:]
    want = made.decode(made.encode(x), x.size).view(np.uint32)
    assert (want != x.view(np.uint32)).any()
    per_packet = made.elements(1408)
    assert x.size % 128 == 0, "the twin encodes them at once"
    with Network(world) as network:
        plans = [copies.all_gather(world, r, x.size, per_packet) for r in range(world)]
        inputs = [x.copy() for _ in range(world)]
        outputs = [np.zeros(world * x.size, np.float32) for _ in range(world)]
        network.run(plans, inputs, outputs, "f32", reliable=True, encoding=encoding)
        for found, came_with in zip(outputs, inputs, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), np.tile(want, world))
            np.testing.assert_array_equal(came_with.view(np.uint32), x.view(np.uint32))
        plans = [copies.broadcast(world, r, x.size, per_packet, root=1) for r in range(world)]
        replicas: list[Array] = [x.copy() if r == 1 else np.zeros_like(x) for r in range(world)]
        network.run(plans, replicas, replicas, "f32", reliable=True, encoding=encoding)
        for replica in replicas:
            np.testing.assert_array_equal(replica.view(np.uint32), want)


@pytest.mark.parametrize(
    ("simd", "encoding"),
    [
        pytest.param(
            simd,
            encoding,
            marks=()
            if encoding == "int4/32" or (simd and encoding == "bf16")
            else pytest.mark.long,
        )
        for simd, encoding in product((True, False), (*NARROW, "int8", "int4/32"))
    ],
)
def test_millions_of_elements_encoded(encoding: str, simd: bool) -> None:
    loss = "loss=0.05,seed=21"
    with Network(2, 1408, inject=loss, disable="" if simd else "simd") as network:
        for case in (case for case in CASES if case.way.millions):
            check(
                network, case, 300_001, "f32", loss, encoding=encoding, repair=1, code=Code(16, 2)
            )


def test_what_can_not_be_encoded_is_refused() -> None:
    x = np.zeros(PAYLOAD, np.float64)
    with Network(2, PAYLOAD) as network:
        plans = [hierarchical.all_reduce(2, r, x.size, PAYLOAD // 8) for r in range(2)]
        with pytest.raises(LossyError, match="argument"):
            network.submit(0, plans[0], (x, x), "f64", encoding="bf16")
        too_many = hierarchical.all_reduce(2, 0, x.size, PAYLOAD // 2 + 1)
        with pytest.raises(LossyError, match="argument"):
            network.submit(0, too_many, (x, x), "f32", encoding="bf16")


def test_ranks_whose_encodings_differ_do_not_believe_each_other() -> None:
    """Whoever submits has encodings compared by the signature. Here it hides the difference."""
    rng, each = np.random.default_rng(6), PAYLOAD // 2
    data = [rounded_elements("f32", 3 * each, rng) for _ in range(2)]
    with Network(2, PAYLOAD, deadline_min=0.2, deadline_max=0.4, liveness=0.5) as network:
        plans = [hierarchical.all_reduce(2, r, 3 * each, each // 2) for r in range(2)]
        own = [x.copy() for x in data]
        tickets = [
            network.submit(r, plans[r], (data[r], data[r]), "f32", encoding=NARROW[r])
            for r in range(2)
        ]
        for r in range(2):
            network.end(r, tickets[r])
            assert network.engines[r].stats().malformed > 0
            made = codec_of(NARROW[r], "f32")
            alone = (data[r] == own[r]) | (data[r] == made.decode(made.encode(own[r]), 3 * each))
            assert alone.all(), "it believed the other"


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    """This thread, and those that it starts, take denormal numbers for zeros."""
    tiny = torch.tensor([1e-39])
    assert torch.set_flush_denormal(True), "this processor can't"
    try:
        assert float(tiny * 1.0) == 0, "the fault was to happen"
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("encoding", list(some(["same", *ENCODED], 4)))
def test_values_do_not_depend_on_how_a_thread_treats_denormal_numbers(encoding: str) -> None:
    """Whose thread flushes them sends, adds and receives what others do: bit for bit."""
    count, found = 128 * 20, []
    small = np.random.default_rng(3).standard_normal((2, count)).astype(np.float32)
    small *= 1e-6 if encoding == "fp16" else 1e-38
    plans = [
        hierarchical.all_reduce(2, r, count, codec_of(encoding, "f32").elements(PAYLOAD))
        for r in range(2)
    ]
    for how in (contextlib.nullcontext, flushing):
        data = list(small.copy())
        with how(), Network(2, PAYLOAD) as network:
            network.run(plans, data, data, "f32", reliable=True, encoding=encoding)
        found += [values.view(np.uint32) for values in data]
    assert found[0].any()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])

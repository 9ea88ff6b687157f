"""An operation in the engine, over real sockets, must end as it does in the reference executor."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from lossycoll.plan import Plan, faults
from lossycoll.plan.codec import elements_of, phases
from lossycoll.plan.sets import NO_PARITY
from tests.oracle import masks, reference_executor
from tests.oracle.codec import Array, wire_type
from tests.oracle.reference_executor import RankResult
from tests.support.network import GROUP, Ended, Network, elements
from tests.support.oracle_cases import Case, buffers


def assert_close(got: Array, want: Array, dtype: str, name: str) -> None:
    if dtype == "bytes":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    kind = wire_type(dtype)
    # The order of a sum is free: two roundings of the wire type are the most it can make.
    rtol = {"f32": 1e-5, "f64": 1e-13, "f16": 4e-3, "bf16": 3e-2}[dtype]
    np.testing.assert_allclose(
        kind.widen(got), kind.widen(want), rtol=rtol, atol=rtol, err_msg=name
    )


def assert_same_bits(got: Array, want: Array, name: str) -> None:
    """Zeros have a sign."""
    bits = np.dtype(f"u{got.itemsize}")
    np.testing.assert_array_equal(got.view(bits), want.view(bits), err_msg=name)


def assert_report(ended: Ended, want: RankResult, plan: Plan, name: str) -> None:
    report = ended.report
    assert report.packets_missing == want.packets_missing, name
    assert report.own_filled == want.own_filled, name
    assert report.kept == want.kept, name
    assert report.zero_filled == want.zero_filled, name
    assert report.alone == want.alone, name
    assert report.deadline_hits == 0, name


def weights(world: int) -> Array:
    """(receiver, sender): numbers that differ from link to link."""
    return 1.0 + np.arange(world * world).reshape(world, world) % 5 / 4


def rounded_elements(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """Float32 that every encoding rounds, but of which no sum of a few is rounded: so its order
    makes no difference. Indices of a few bits have one exponent for a group, so all of these have
    the same."""
    assert dtype == "f32"
    sign = rng.choice(np.array([-1, 1], np.float32), count)
    values: Array = sign * (rng.integers(1 << 12, 3 << 11, count).astype(np.float32) / (1 << 13))
    return values


def rough_elements(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """Of every magnitude, so that another order gives another sum."""
    kind = wire_type(dtype)
    assert kind.acc is not None
    values = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 7, count)
    return kind.narrow(values.astype(kind.acc))


def sums_exactly(case: Case, world: int, encoding: str) -> bool:
    """Whether that holds for these sums: weights make indices of many bits too long for float32."""
    return not case.way.weighted or world < 3 or not re.search("int[86]", encoding)


def check(
    network: Network,
    case: Case,
    count: int,
    dtype: str,
    loss: str,
    *,
    encoding: str = "same",
    exact: bool = False,
    **how: Any,
) -> int:
    """Runs one operation in the engine and in the reference. Returns the packets it lost.

    What was encoded has to be equal to the bit; ``exact``: in any case. What is ``deterministic``
    too, of elements whose sums depend on their order. Of an encoding of two phases copies take the
    second.
    """
    if not case.sums:
        encoding = phases(encoding)[1]
    per_packet = elements_of(encoding, dtype, network.payload_bytes)
    rng = np.random.default_rng(network.op)
    plans = case.plans(network.world, count, per_packet, network.op)
    draw = elements if encoding == "same" else rounded_elements
    in_order = case.sums and bool(how.get("deterministic"))
    draw = rough_elements if in_order else draw
    inputs, outputs = buffers(case, plans, dtype, rng, draw)
    want_in = [x.copy() for x in inputs]
    want_out = want_in if case.in_place else [x.copy() for x in outputs]
    lost = partial(masks.lost, faults.parse(loss), GROUP, network.op)
    scale = float(network.world)
    rounds = None if how.get("reliable") else how.get("repair", 0)
    # Exact in every type, so that rounding doesn't depend on who multiplies.
    weighing: dict[str, Any] = (
        {"weights": weights(network.world), "divisor": network.world + 0.5}
        if case.way.weighted
        else {}
    )
    name = f"{case.name} world={network.world} count={count} {dtype} {encoding} {loss} {how}"
    name += f" op={network.op}"
    ended = network.run(plans, inputs, outputs, dtype, scale, encoding=encoding, **how, **weighing)
    want = reference_executor.execute(
        plans,
        want_in,
        want_out,
        dtype,
        scale,
        lost,
        rounds,
        code=how.get("code", NO_PARITY),
        encoding=encoding,
        name=(GROUP, network.op - 1),
        deterministic=in_order,
        **weighing,
    )
    for rank in range(network.world):
        assert ended[rank].code == 0, (name, ended[rank].failure)
        if in_order and not case.barrier:
            assert_same_bits(outputs[rank], want_out[rank], f"{name} rank={rank}")
        elif encoding == "same" and not exact:
            assert_close(outputs[rank], want_out[rank], dtype, f"{name} rank={rank}")
        else:
            np.testing.assert_array_equal(outputs[rank], want_out[rank], f"{name} rank={rank}")
        if case.barrier:
            assert outputs[rank].tolist() == [network.world], f"{name} rank={rank}"
        assert_report(ended[rank], want[rank], plans[rank], f"{name} rank={rank}")
    return sum(e.report.packets_injected for e in ended)

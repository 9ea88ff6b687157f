"""Means that are divided by the weights of what came: the engine's are the reference's."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import LossyError
from lossycoll.plan import Finish, Plan, faults, owners, ring
from lossycoll.plan.codec import elements_of, named
from tests.oracle import masks
from tests.oracle.reference_executor import execute
from tests.support.network import GROUP, Network
from tests.support.oracle_cases import PAYLOAD
from tests.support.oracle_checks import assert_report, rounded_elements

ENCODINGS = (
    "same",
    "bf16",
    "fp16",
    "int4",
    named("int5", 32),
    named("int4/int5", 32),
    named("int3", 32, 1),
    named("int4", 32, 0, "stochastic"),
)
LOSS = "loss=0.2,dup=0.05,reorder=0.1,seed=11"


@pytest.mark.parametrize("loss", ["", LOSS, "loss=0.5,burst=3,seed=10"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_engine_equals_reference(world: int, loss: str) -> None:
    dropped = 0
    rng = np.random.default_rng(world)
    with Network(world, PAYLOAD, inject=loss) as network:
        for turn, (encoding, keeps) in enumerate(product(ENCODINGS, (False, True))):
            each = elements_of(encoding, "f32", PAYLOAD)
            gives = [(turn + r) % 3 > 0 or r == turn % world for r in range(world)]
            rates = [1 + (turn + r) % 4 if gives[r] else 0 for r in range(world)]
            lengths = owners.owned(int(rng.integers(1, 20 * each)), each, rates)
            plans = [owners.all_reduce(world, r, lengths, gives, each) for r in range(world)]
            # Exact in every type and order.
            weights = np.tile(np.where(gives, 0.5 ** (np.arange(world) % 3), 0.0), (world, 1))
            got = [rounded_elements("f32", sum(lengths), rng) for _ in range(world)]
            want = [x.copy() for x in got]
            how: dict[str, Any] = {"weights": weights, "divisor": 0.0, "encoding": encoding}
            how["keeps_sums"] = keeps
            ended = network.run(plans, got, got, "f32", **how)
            lost = partial(masks.lost, faults.parse(loss), GROUP, network.op - 1)
            name = (GROUP, network.op - 1)
            said = execute(plans, want, want, "f32", 1.0, lost, 0, name=name, **how)
            for rank in range(world):
                label = f"{encoding} keeps={keeps} rank={rank} gives={gives}"
                assert ended[rank].code == 0, (label, ended[rank].failure)
                np.testing.assert_array_equal(got[rank], want[rank], label)
                assert_report(ended[rank], said[rank], plans[rank], label)
            dropped += sum(e.report.packets_injected for e in ended)
    assert (dropped > 0) == bool(loss and world > 1)


def test_what_has_no_weight_to_divide_by() -> None:
    """Weights that nobody has told, or of 0, and sums of which some are partial."""
    with Network(3, PAYLOAD) as network:
        values = np.ones(60, np.float32)
        plan = owners.all_reduce(3, 0, (20, 20, 20), (True, True, True), 20)
        by_ring = ring.all_reduce(3, 0, 60, 20, finish=Finish.WEIGHTED)
        cases: list[tuple[Plan, list[float] | None]] = [
            (plan, None),
            (plan, [1.0, 0.0, 1.0]),
            (plan, [0.0, 1.0, 1.0]),
            (by_ring, [1.0, 1.0, 1.0]),
        ]
        for one, row in cases:
            weights = None if row is None else np.tile(row, (3, 1))
            with pytest.raises(LossyError, match="argument"):
                network.submit(0, one, (values, values), "f32", weights=weights, divisor=0.0)

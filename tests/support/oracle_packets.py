"""What the ranks learn of single packets must be what the reference executor says of each.

Both checks run one operation in the engine and in the reference, and return every rank's outcome.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lossycoll.plan import Finish, copies, faults, packet_count, reduce_scatter
from lossycoll.plan.sets import NO_PARITY, Code
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from tests.oracle import masks, reference_executor
from tests.support.network import GROUP, Ended, Network, elements
from tests.support.oracle_checks import assert_close


def check_needed(
    network: Network, count: int, loss: str, share: float, *, repair: int, code: Code = NO_PARITY
) -> tuple[list[Ended], int]:
    """An all-gather of ``count`` bytes from each rank. What a receiver needs comes, and no others.

    Each packet is needed with probability ``share``. Also returns how many were.
    """
    world, per_packet = network.world, network.payload_bytes
    rng = np.random.default_rng(network.op)
    lost = partial(masks.lost, faults.parse(loss), GROUP, network.op)
    network.op += 1
    plans = [copies.all_gather(world, r, count, per_packet) for r in range(world)]
    packets = packet_count(count, per_packet)
    needed = rng.random((world, world, packets)) < share  # (receiver, owner, packet)
    inputs = [elements("bytes", count, rng) for _ in range(world)]
    outputs = [elements("bytes", count * world, rng) for _ in range(world)]
    want_out = [x.copy() for x in outputs]
    blocks = [Blocks(plans[r], [count] * world, per_packet, needed[r]) for r in range(world)]
    tickets = [
        network.submit(
            r,
            plans[r],
            (inputs[r], outputs[r]),
            "bytes",
            repair=repair,
            needed=blocks[r].encoded(),
            code=code,
        )
        for r in range(world)
    ]
    want = reference_executor.execute(
        plans,
        inputs,
        want_out,
        "bytes",
        1.0,
        lost,
        repair,
        needed=lambda sender, receiver, slot, n: needed[receiver, sender],
        code=code,
    )
    out = []
    for r in range(world):
        ended = network.end(r, tickets[r], note=partial(blocks[r].note, network.engines[r]))
        assert ended.code == 0
        np.testing.assert_array_equal(outputs[r], want_out[r])
        for owner in set(range(world)) - {r}:
            gone = np.flatnonzero(~blocks[r].arrived[owner])
            assert gone.tolist() == want[r].missing[owner, owner].tolist()
            assert not needed[r, owner, gone].any()
        assert blocks[r].arrived[r].all()
        assert ended.report.packets_missing == want[r].packets_missing
        out.append(ended)
    return out, int(needed.sum())


def check_reported_loss(
    network: Network, count: int, loss: str, *, repair: int = 0, code: Code = NO_PARITY
) -> tuple[list[Ended], int]:
    """A reduce-scatter of chunks of ``count`` floats. Senders learn which packets were given up.

    Also returns how many were.
    """
    world, per_packet = network.world, network.payload_bytes // 4
    rng = np.random.default_rng(network.op)
    lost = partial(masks.lost, faults.parse(loss), GROUP, network.op)
    network.op += 1
    plans = [
        reduce_scatter.reduce_scatter(world, r, count, per_packet, finish=Finish.WEIGHTED)
        for r in range(world)
    ]
    inputs = [elements("f32", count * world, rng) for _ in range(world)]
    outputs = [elements("f32", count, rng) for _ in range(world)]
    want_out = [x.copy() for x in outputs]
    parts = [Contributions(plan, 4) for plan in plans]
    tickets = [
        network.submit(
            r,
            plans[r],
            (inputs[r], outputs[r]),
            "f32",
            repair=repair,
            divisor=float(world),
            feedback=True,
            code=code,
        )
        for r in range(world)
    ]
    want = reference_executor.execute(plans, inputs, want_out, "f32", 1.0, lost, repair, code=code)
    out, reported = [], 0
    for r in range(world):
        ended = network.end(r, tickets[r], note=partial(parts[r].note, network.engines[r]))
        assert ended.code == 0
        assert_close(outputs[r], want_out[r], "f32", f"rank {r}")
        for owner in set(range(world)) - {r}:
            gone = np.flatnonzero(parts[r].lost[owner])
            assert len(parts[r].lost[owner]) == packet_count(count, per_packet)
            assert gone.tolist() == want[owner].missing[owner, r].tolist()
            reported += len(gone)
        assert not parts[r].lost[r].any()
        out.append(ended)
    return out, reported

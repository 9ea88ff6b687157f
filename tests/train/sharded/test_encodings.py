"""ShardedOptimizer in a group whose option `wire` rounds float32: gradients are, parameters not."""

from __future__ import annotations

import torch
import torch.distributed as dist

import lossycoll
from tests.oracle.codec import codec_of
from tests.support.harness import EXACT, init, run_good
from tests.support.sharded_cases import (
    batch,
    flat,
    network,
    replicas,
    sharded,
)
from tests.support.sharded_scripts import step_both


def rank_trains(rank: int, world: int) -> dict[str, tuple[float, bool, bool]]:
    """By delivery: how far the model is from one that is trained alone, whether replicas are equal,
    and whether parameters have been rounded."""
    init()
    out = {}
    for delivery in ("lossy", "reliable"):
        options = lossycoll.Options(wire="bf16", delivery=delivery, lossy_min_bytes=0)
        group = dist.new_group(backend="lossy", pg_options=options)
        model, plain = network(), network()
        mine = sharded(model.parameters(), torch.optim.SGD, group, lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(5):
            step_both(mine, theirs, model, plain, batch(step, world), rank)
        rows, made = replicas(model, group), codec_of("bf16", "f32")
        own = flat(model.parameters()).numpy()
        rounded = bool((made.decode(made.encode(own), len(own)) == own).all())
        off = float((flat(model.parameters()) - flat(plain.parameters())).abs().max())
        out[delivery] = off, bool((rows == rows[0]).all()), rounded
    dist.destroy_process_group()
    return out


def test_gradients_are_rounded_and_parameters_stay_exact() -> None:
    for found in run_good(
        rank_trains, 2, {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LINK": "udp", **EXACT}
    ):
        for off, equal, rounded in found.values():
            assert 1e-6 < off < 1e-2, "gradients are in bf16, and steps small"
            assert equal
            assert not rounded

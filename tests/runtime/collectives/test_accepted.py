"""What Python's checks let pass, the engine takes: a call that only the engine refuses ends its
group, though all ranks refuse it alike."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Finish, Missing, Topology, packet_count
from lossycoll.plan.model import MOST_SLOTS
from lossycoll.plan.registry import COLLECTIVES
from lossycoll.runtime.collectives import operations, plan_cache
from lossycoll.runtime.collectives.estimators import BY_COUNT, Means
from lossycoll.runtime.collectives.group_context import Members
from lossycoll.runtime.collectives.plan_cache import layout_of
from lossycoll.runtime.engine.binding import DType, EngineCall
from tests.support.shared_ranks import PAYLOAD, SHARED, SharedNetwork

WORLD = 5
SHARING = (0, 1, 2)
"""They share a host; each other rank has one of its own."""
CALLS = 120
"""Of one group, which takes them up and never hears the others of it."""
VALUES: dict[str, list[Any]] = {
    "delivery": ["lossy", "reliable"],
    "repair": [0, 1, 255],
    "fec": ["auto", 0, 1e-6, 0.01, 0.5, 0.999, 1.0],
    "max_missing": [0.0, 1e-9, 0.01, 1.0],
    "estimator": ["count", "inverse_probability", "zero_fill"],
    "on_missing": ["own", "keep", "zero"],
    "algorithm": ["auto", "ring", "transpose", "hierarchical"],
    "seed": [0, 2**64 - 1],
}
SITES = ([0] * 5, [0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 2])
SIZES = (0, 1, 2, 3, 5, 63, 64, 1000, 4097, 65_536, 200_000)


def options_of(draw: random.Random) -> Options:
    while True:
        given = {name: draw.choice(VALUES[name]) for name in VALUES if draw.random() < 0.5}
        try:
            return Options(**given)
        except OptionError:
            continue


def plan_of(
    draw: random.Random, rank: int, options: Options, collective: str, dtype: DType, per: int
) -> EngineCall:
    """A plan by a topology, sizes and algorithm that are drawn."""
    topology = Topology.of_labels(
        [0, 0, 0, 1, 2], draw.choice(SITES), draw.choice([1, 2, SHARED // PAYLOAD])
    )
    members = Members(WORLD, rank, tuple(range(WORLD)))
    name = plan_cache.name_of(options, topology)
    by, hosts = choice = plan_cache.algorithm(collective, members, name, topology)
    more: dict[str, Any] = {} if hosts is None else {"topology": hosts}
    elements = draw.choice(SIZES)
    sizes: tuple[Any, ...] = (elements // WORLD, per)
    if collective == "all_reduce":
        sizes = (elements, per)
        more["missing"] = draw.choice(list(Missing))
        if by.draws_order:
            number = draw.randrange(1000)
            more["order"] = plan_cache.order(
                choice, members, options, 1, number, packet_count(elements, per)
            )
    elif collective == "all_to_all_uneven":
        send, receive = ([draw.randrange(500) for _ in range(WORLD)] for _ in range(2))
        receive[rank] = send[rank]
        sizes = (tuple(send), tuple(receive), per)
    elif collective == "barrier":
        sizes, more["fanout"] = (1,), 4
    if collective in ("broadcast", "gather", "scatter"):
        more["root"] = draw.randrange(WORLD)
    return plan_cache.made(members, by, *sizes, **more)


def submit_one(draw: random.Random, network: SharedNetwork, rank: int, memory: Any) -> None:
    """Raises what the engine refuses it with."""
    options = options_of(draw)
    collective = draw.choice(list(COLLECTIVES))
    dtype, encoding = DType.BYTES, "same"
    if collective in ("all_reduce", "reduce_scatter"):
        dtype = draw.choice([each for each in DType if each is not DType.BYTES])
    if dtype is DType.F32:
        encoding = draw.choice(["same", "bf16", "fp16"])
    if collective == "barrier":
        dtype = DType.F32
    per = layout_of(PAYLOAD, dtype, encoding).per_packet
    planned = plan_of(draw, rank, options, collective, dtype, per)
    estimator = "" if options.delivery == "reliable" else options.estimator
    call = (collective, dtype.name, 1, "", "")
    key = (planned, call, estimator, options, dtype, 1.0, 1e9, encoding, False, False)
    weighted = Means(Finish.WEIGHTED, (0.0, 1.0, 1e300, 2.0, 1.0), 1.0)
    means = draw.choice([BY_COUNT, weighted])
    into = memory[draw.randrange(2)]  # in place, or not
    buffers = memory[0].ctypes.data, into.ctypes.data
    network.engines[rank].submit(operations.prepare(key, means), *buffers)


MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 9)]


@pytest.mark.parametrize("seed", [1, *MORE])
def test_the_engine_takes_what_python_does(seed: int) -> None:
    draw = random.Random(seed)
    memory = np.zeros((2, 2_000_000), np.uint8)
    with SharedNetwork(WORLD, sharing=SHARING) as network:
        rank = draw.randrange(WORLD)
        for _ in range(CALLS):
            submit_one(draw, network, rank, memory)


def test_numbers_of_slots_are_those_that_the_engine_takes() -> None:
    header = Path(__file__).resolve().parents[3] / "native" / "wire.h"
    found = re.search(r"LC_SLOT_MESSAGE = (0x[0-9A-F]+)", header.read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1], 16) == MOST_SLOTS

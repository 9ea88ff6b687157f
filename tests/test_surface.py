"""The whole surface of torch.distributed: every collective, type, layout and mode, exact.

The expected values are computed by each rank from the seeds of all. Packets are lost on purpose:
what is below ``lossy_min_bytes``, and what isn't a sum of floats, must be exact all the same.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from harness import init, run_good

LOSS = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_INJECT": "loss=0.05,seed=3",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LOSSY_MIN_BYTES": "1000000",
}


def rank_table(rank: int, world: int) -> dict[str, Any]:
    import surface_cases as cases
    from surface_kit import EVERY, LAYOUTS, SUMMABLE, Table, operations

    import lossycoll

    warnings.simplefilter("ignore", FutureWarning)
    init(timeout=30)
    table = Table(rank, world)
    for case in cases.COPIES:
        for dtype in EVERY:
            table.kit(case.__name__, case, dtype, LAYOUTS[table.done % len(LAYOUTS)])
        for layout in LAYOUTS:
            table.kit(case.__name__, case, layout=layout)
    for case in cases.REDUCTIONS:
        for dtype in SUMMABLE:
            for op in operations(dtype):
                layout = LAYOUTS[table.done % len(LAYOUTS)]
                table.kit(
                    f"{case.__name__} {op}",
                    lambda kit, case=case, op=op: case(kit, op),
                    dtype,
                    layout,
                )
        for layout in LAYOUTS:
            table.kit(case.__name__, case, layout=layout)
    for case, dtypes in cases.ODD:
        for dtype in dtypes:
            table.kit(case.__name__, case, dtype)
    import torch.distributed as dist

    dropped = lossycoll.stats().packets_injected if world > 1 else 0
    dist.destroy_process_group()
    return {"done": table.done, "failures": table.failures, "dropped": dropped}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_collective_type_and_layout(world: int) -> None:
    outs = run_good(rank_table, world, LOSS)
    failures = [f"rank {rank}: {text}" for rank, out in enumerate(outs) for text in out["failures"]]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])
    assert min(out["done"] for out in outs) > 500
    assert world == 1 or sum(out["dropped"] for out in outs) > 0, "the fault did not happen"

"""ARC-Top-K as a communication hook of DistributedDataParallel."""

# Annotations are no text in this file: DDP compares the hook's with its own classes.
from typing import Any

import torch
import torch.distributed as dist

from lossycoll.backend.work import value_or_raise
from lossycoll.train.common.arguments import check_dense
from lossycoll.train.compress.arc_topk import ARCTopKState


def arc_topk_hook(
    state: ARCTopKState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``; see :class:`ARCTopKState`.

    On the CPU a bucket is compressed and sent by a thread of the state's own, while the backward
    pass goes on. The last bucket's call returns when all is there: then nothing of DDP's own can
    come between this step's collectives.
    """
    flat = bucket.buffer()
    check_dense(flat, "arc_topk_hook")
    keys = state.keys(bucket.parameters())
    gradients, last = bucket.gradients(), bucket.is_last()
    source: torch.futures.Future[Any] = torch.futures.Future()
    out = source.then(value_or_raise)

    def work() -> None:
        try:
            state.reduce(keys, gradients, flat)
            if last:
                state.iter += 1
            source.set_result(flat)
        except BaseException as error:
            source.set_result(error)

    if flat.is_cpu:
        done = state.start(work)
        if last:
            done.result()
    else:
        work()
    return out

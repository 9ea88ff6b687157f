"""ARC-Top-K as a communication hook of DistributedDataParallel."""

# Annotations are no text in this file: DDP compares the hook's with its own classes.
from typing import Any

import torch
import torch.distributed as dist

from lossycoll.backend.work import value_or_raise
from lossycoll.train.compress.arc_topk import ARCTopKState
from lossycoll.train.hooks.addends import check_dense


def arc_topk_hook(
    state: ARCTopKState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients by ARC-Top-K: a sketch, and the rows that it shows to be largest.

    Register it once, with a state of your own::

        ddp.register_comm_hook(lossycoll.ARCTopKState(ratio=0.2), lossycoll.arc_topk_hook)

    On the CPU a thread of the state's compresses and sends a bucket while the backward pass
    continues. The call for the last bucket returns when all are complete, so that no collective of
    DDP's own comes between them. Method and costs: docs/arc_topk.md; source: arXiv 2510.26709.

    Args:
        state: The arguments, and what is remembered between steps; counts the steps.
        bucket: DDP's bucket of dense gradients, of any shapes; they are replaced in place.

    Returns:
        A future of the bucket's buffer. It raises what :meth:`ARCTopKState.mean_` raises.

    Raises:
        UnsupportedError: The gradients are sparse.
        TrainingError: A parameter is not one of the state's ``named_parameters``.
    """
    flat = bucket.buffer()
    check_dense(flat, "arc_topk_hook")
    keys = state.keys(bucket.parameters())
    gradients, last = bucket.gradients(), bucket.is_last()
    # With its device it orders the streams of those who wait for it.
    devices = [] if flat.is_cpu else [flat.device]
    source: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
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

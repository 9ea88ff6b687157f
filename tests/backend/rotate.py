"""A collective from outside the package: every rank sends its tensor some ranks on."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.description import CollectiveKind, Description, Loss, Submission
from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.backend.staging import two_buffers
from lossycoll.backend.tensors import nbytes
from lossycoll.runtime.collectives.endpoint import UNEVEN
from lossycoll.runtime.core.call import Operation


def submit(s: Submission) -> Operation:
    """All bytes to the next rank, all bytes from the one before."""
    where, steps = s.health.where, s.description.argument
    to, source = (where.rank + steps) % where.world, (where.rank - steps) % where.world
    send = tuple(nbytes(s.source) if rank == to else 0 for rank in range(where.world))
    receive = tuple(nbytes(s.target) if rank == source else 0 for rank in range(where.world))
    return s.endpoint.copy(UNEVEN, s.call, s.buffers, s.call_options, send, receive)


ROTATE = CollectiveKind("rotate", Loss.NEVER, two_buffers, submit=submit)


def rotate(group: LossyProcessGroup, output: Tensor, input: Tensor, steps: int) -> dist.Work:
    """``output`` becomes the ``input`` of the rank that is ``steps`` before this one."""
    return group.run(
        Description(
            ROTATE,
            reads=[input],
            writes=[output],
            nbytes=nbytes(input),
            compared=input,
            detail=f"by {steps}",
            argument=steps,
        )
    )

"""The mean of all ranks' vectors, of which each rank knows what of its own is in it.

Over a lossy group it goes in two halves. The first, to the owners, may lose packets, and each
sender learns which of its contributions the owners gave up (docs/streams.md, "Reporting loss to the
sender"). The second, back from the owners, loses nothing. So all ranks have one mean, bit for bit,
and each knows what of its own is in it: error feedback needs no more.

Both halves may travel in few bits. What rounding takes from a contribution isn't in the mean. What
it adds to a mean counts as the owner's contribution: so the mean is always that of what counts as
delivered, and error feedback makes up for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lossycoll.errors import PeerLostError
from lossycoll.plan.codec import codec_of
from lossycoll.train.common.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of all ranks' vectors."""

    values: Tensor  # (n,), the same on all ranks
    # (n,), what of this rank's vector is in the mean; its vector itself where nobody wants to know,
    # or nothing was lost
    delivered: Tensor


def padded(collectives: Collectives, numel: int, like: Tensor) -> Tensor:
    """A vector of ``numel`` uninitialized elements, and zeros up to a multiple of the world."""
    chunk = -(-numel // collectives.world)
    out = like.new_empty(chunk * collectives.world)
    out[numel:].zero_()
    return out


def mean(collectives: Collectives, flat: Tensor, *, feedback: bool) -> Mean:
    """The mean over the ranks of (n,), which :func:`padded` made and which stays.

    With ``feedback`` what is lost counts as zero and is reported; otherwise the mean is over the
    contributions that arrived.
    """
    if is_exact(collectives, flat):
        total = flat.clone()
        exact_mean(collectives, total)
        return Mean(total, flat)
    own = flat.new_empty(len(flat) // collectives.world)
    delivered = flat
    if feedback:
        # Of a host it is the sum that is sent, and found there afterwards.
        sent = flat.clone()
        report = collectives.reduce_scatter_reported(own, sent)
        report.wait()
        check_members(collectives)
        missed = report.missed
        delivered = flat if missed is None else flat - missed
    else:
        collectives.reduce_scatter_mean(own, flat.clone()).wait()
        check_members(collectives)
    if collectives.parameter_encoding(own) != "same":
        exact = own.clone()
        collectives.round_parameters(own)
        if feedback:
            delivered = flat.clone() if delivered is flat else delivered
            part = delivered.view(collectives.world, -1)[collectives.rank]
            part.add_(own - exact, alpha=collectives.world)
    return Mean(collectives.all_gather_parameters(own).view(-1), delivered)


def exact_mean(collectives: Collectives, flat: Tensor) -> None:
    """Replaces (n,) by the mean over the ranks, of whom none may be lost."""
    narrow = flat.dtype is torch.float16  # whose sum could overflow; bfloat16 has float32's range
    if narrow:
        flat.div_(collectives.world)
    collectives.all_reduce(flat).wait()
    check_members(collectives)
    if not narrow:
        flat.div_(collectives.world)


def is_exact(collectives: Collectives, like: Tensor) -> bool:
    """True if nothing is lost, nor travels in few bits; the same on all ranks."""
    encodings = collectives.gradient_encoding(like), collectives.parameter_encoding(like)
    return not collectives.may_lose and encodings == ("same", "same")


def sent_bytes(collectives: Collectives, like: Tensor, count: int) -> int:
    encoding = collectives.gradient_encoding(like)
    if encoding == "same":
        return count * like.element_size()
    return codec_of(encoding, "f32").wire_bytes(count)


def check_members(collectives: Collectives) -> None:
    lost = collectives.agreed_lost()
    if lost:
        raise PeerLostError(
            f"{collectives}: rank {lost[0]} is lost, and with it the errors that it still owed; "
            f"restart with the ranks that are left, or call reset() on all of them and use a "
            f"group of theirs",
            peer=lost[0],
        )

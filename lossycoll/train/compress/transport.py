"""The mean of all ranks' vectors, of which each rank knows what of its own is in it.

Over a lossy group it goes in two halves. The first, to the owners, may lose packets, and each
sender learns which of its contributions the owners gave up (docs/engine.md, "Reporting loss to the
sender"). The second, back from the owners, loses nothing. So all ranks have one mean, bit for bit,
and each knows what of its own is in it: error feedback needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lossycoll.errors import PeerLostError
from lossycoll.train.common.collectives import Collectives, as_elements
from lossycoll.train.common.staleness import Mask


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of all ranks' vectors.

    Attributes:
        values: (n,), the same on all ranks.
        lost: bool (n,), the elements of this rank's vector that were lost on the way. None if none
            were, or if nobody wants to know.
    """

    values: Tensor
    lost: Tensor | None


def padded(collectives: Collectives, numel: int, like: Tensor) -> Tensor:
    """Makes a vector that splits into an equal chunk for each rank.

    Args:
        collectives: Of the ranks.
        numel: Elements that are used, which are left uninitialized; zeros follow.
        like: Has the type and the device that are wanted.

    Returns:
        (n,), n the next multiple of the world.
    """
    chunk = -(-numel // collectives.world)
    out = like.new_empty(chunk * collectives.world)
    out[numel:].zero_()
    return out


def mean(collectives: Collectives, flat: Tensor, *, feedback: bool) -> Mean:
    """The mean over the ranks.

    Args:
        collectives: Of the ranks.
        flat: (n,), this rank's, which :func:`padded` has made and which stays.
        feedback: Whether what is lost counts as zero, and is reported. Otherwise the mean is over
            the contributions that arrived.

    Returns:
        The mean, and what of ``flat`` isn't in it.

    Raises:
        PeerLostError: On all ranks, after the loss of a rank.
    """
    if not collectives.may_lose:
        total = flat.clone()
        collectives.all_reduce(total).wait()
        return Mean(total.div_(collectives.world), None)
    own = flat.new_empty(len(flat) // collectives.world)
    lost: Mask | None = None
    if feedback:
        lost = collectives.reduce_scatter_reported(own, flat).lost
    else:
        collectives.reduce_scatter_mean(own, flat).wait()
    check_members(collectives)
    total = collectives.all_gather(own).view(-1)
    if lost is None or not lost.any():
        return Mean(total, None)
    return Mean(total, as_elements(lost, collectives.block_elements(flat), len(own)))


def check_members(collectives: Collectives) -> None:
    """Checks that the last collective was made with all ranks.

    Otherwise what a lost rank remembered is lost, and the means are of ranks that are not there any
    more.

    Args:
        collectives: Of the ranks.

    Raises:
        PeerLostError: It was not; on all ranks.
    """
    lost = collectives.agreed_lost()
    if lost:
        raise PeerLostError(
            f"{collectives}: rank {lost[0]} is lost, and with it the errors that it still owed; "
            f"restart with the ranks that are left, or call reset() on all of them and use a "
            f"group of theirs",
            peer=lost[0],
        )

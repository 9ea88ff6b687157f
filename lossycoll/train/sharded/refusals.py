"""Errors of a sharded optimizer: steps that would be wrong, and ranks lost with their shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from lossycoll.errors import NonFiniteError, PeerLostError, TrainingError
from lossycoll.train.common.collectives import Collectives

REMEDY: Final = (
    "A rank that is lost had the only copy of its share of the optimizer's state: restart with the "
    "ranks that are left from the last checkpoint, which loads at any number of ranks"
)


@contextlib.contextmanager
def owners_needed() -> Iterator[None]:
    """A scope in which PeerLostError also says what the loss means here."""
    try:
        yield
    except PeerLostError as error:
        if REMEDY in str(error):
            raise
        raise PeerLostError(f"{error}. {REMEDY}", peer=error.peer) from error


def check_owners(collectives: Collectives) -> None:
    """Checks that all ranks took part in the last collective; else PeerLostError on all alike."""
    lost = collectives.agreed_lost()
    if lost:
        who = ", ".join(collectives.peer(rank) for rank in lost)
        raise PeerLostError(f"{collectives}: lost {who}. {REMEDY}", peer=lost[0])


def unscaled_early(collectives: Collectives) -> TrainingError:
    return TrainingError(
        f"{collectives}: a GradScaler has unscaled the gradients of "
        f"optimizer.param_groups, or they were changed, before they were reduced, which "
        f"has no effect on them; call optimizer.reduce_gradients() on all ranks after the "
        f"last backward pass within no_sync(), before scaler.unscale_() and scaler.step(); "
        f"now begin this step anew with optimizer.zero_grad() and scaler.update()"
    )


def changed_gradient(collectives: Collectives, name: str) -> TrainingError:
    return TrainingError(
        f"{collectives}: the gradient of {name} was changed "
        f"after the backward pass had sent it, which has no effect; clip by "
        f"optimizer.clip_grad_norm_(max_norm), change the gradients of "
        f"optimizer.param_groups instead, or change them by hooks that are registered "
        f"before the optimizer is made; if a backward pass within no_sync() came "
        f"after that, or parameters were added, call optimizer.reduce_gradients(), "
        f"before scaler.unscale_() if there is one; and don't wrap the model in "
        f"DistributedDataParallel"
    )


def nonfinite(collectives: Collectives, ranks: Sequence[int]) -> NonFiniteError:
    who = ", ".join(collectives.peer(rank) for rank in ranks)
    return NonFiniteError(
        f"{collectives}: the gradient of {who} holds NaN or infinity, and no rank took a "
        f"step; lower the learning rate or clip, use a torch.amp.GradScaler with float16, "
        f"or skip such steps by on_nonfinite='skip'",
        ranks,
    )

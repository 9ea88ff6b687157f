"""What the loss of a rank means to a sharded optimizer: its chunks have no owner any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from lossycoll.errors import PeerLostError
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

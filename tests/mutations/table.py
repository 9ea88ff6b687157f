"""The mutations, and the test that notices each. ``make mutate`` tries them.

Two that were tried are not here, since they change nothing that can be seen:

- A FIN that isn't repeated once its operation has ended (native/timers.c, tick_late_fins): the
  receiver asks for the end of a silent stream every 100 ms (ask), and the answer to that question
  for an operation that is over is FIN (native/records_in.c, on_ask). What is lost is some
  milliseconds.
- Packets of a rank that was given up are taken (native/datagrams.c, peer->dead): its streams are
  given up by then, so what comes is stale (native/stream_in.c, lc_in_take), and operations that
  begin later count it out before its first packet. What differs is a counter.
"""

from __future__ import annotations

from .calls import CALLS
from .deadlines import DEADLINES
from .devices import DEVICES
from .laboratory import LABORATORY
from .links import LINKS
from .lowbit import LOWBIT
from .membership import MEMBERSHIP
from .messages import MESSAGES
from .parity import PARITY
from .rdma import RDMA
from .sealing import SEALING
from .sums import SUMS
from .swarm import SWARM
from .training import TRAINING

MUTATIONS = (
    LINKS
    + CALLS
    + DEADLINES
    + MESSAGES
    + PARITY
    + SUMS
    + LOWBIT
    + MEMBERSHIP
    + TRAINING
    + LABORATORY
    + SEALING
    + SWARM
    + DEVICES
    + RDMA
)

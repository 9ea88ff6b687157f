"""A send or a receive: an operation that one other rank takes part in."""

from __future__ import annotations

from lossycoll.runtime.core.call import CallOptions, Collective, Operation, Submitter


class Transfer(Operation):
    """``peer``: the other rank; None as long as a receive from any rank has none."""

    __slots__ = ("is_send", "peer")

    def __init__(
        self,
        messages: Submitter,
        call: Collective,
        call_options: CallOptions,
        timeout: float,
        *,
        is_send: bool,
        peer: int | None,
    ) -> None:
        super().__init__(messages, call, call_options, timeout)
        self.is_send = is_send
        self.peer = peer

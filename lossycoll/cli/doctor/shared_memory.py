"""Whether ranks of this machine can share memory: the attempt, with both ends in this process."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from .findings import Finding, Severity, good_if
from .job_environment import local_ranks

if TYPE_CHECKING:
    from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange

TOKEN = "doctor"
NAME = "memory sharing"


def memory_sharing() -> list[Finding]:
    from lossycoll.runtime.engine.host import shared_bytes
    from lossycoll.runtime.net.control_groups import memory_room
    from lossycoll.runtime.net.machine import this_machine

    advice = "ranks of this machine use UDP among themselves, which is slower"
    try:
        this_machine()
        reason = _attempt()
    except OSError as error:
        reason = str(error)
    if reason:
        return [Finding(NAME, Severity.WARN, f"no: {reason}", advice)]
    ranks = local_ranks()
    room, wanted = memory_room(), ranks * shared_bytes(ranks)
    advice = (
        f"{ranks} ranks may take {wanted >> 20} MiB of shared memory, and use UDP where they "
        f"can't: raise the memory limit of their control group"
    )
    found = f"yes, among processes of user {os.geteuid()} in this network namespace"
    if room < 1 << 60:
        found += f"; {room / 2**30:.1f} GiB of memory free"
    return [good_if(room >= wanted, NAME, found, Severity.WARN, advice)]


def _attempt() -> str:
    """Why descriptors can't be handed over; empty if they can."""
    from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange

    with contextlib.ExitStack() as undo:
        ends = [DescriptorExchange(1) for _ in range(2)]
        for end in ends:
            undo.callback(end.close)
        asleep, wake = os.pipe()
        undo.callback(os.close, asleep)
        undo.callback(os.close, wake)
        memory = _sealed_memory()
        undo.callback(os.close, memory)
        return _hand_over(ends[0], ends[1], (memory, wake))


def _hand_over(
    sender: DescriptorExchange, receiver: DescriptorExchange, descriptors: tuple[int, int]
) -> str:
    failed = sender.send(0, TOKEN, {1: receiver.name}, descriptors)
    receiver.take(TOKEN, [0])
    reasons = [*failed.values(), *receiver.refused.values()]
    return "" if 0 in receiver.taken else (reasons or ["nothing came"])[0]


def _sealed_memory() -> int:
    import fcntl

    from lossycoll.runtime.net.descriptor_exchange import F_SEAL_FUTURE_WRITE, SEALS

    memory = os.memfd_create("lossycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
    return memory

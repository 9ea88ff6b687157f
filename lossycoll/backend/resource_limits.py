"""System limits of a process, descriptors and memory, as errors that reach all ranks.

Some libraries end the process that is refused a descriptor, so a group looks before it is made
whether there are enough.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from lossycoll.errors import EngineError, LossyError
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.engine.failures import Code

DESCRIPTORS: Final = (32, 4)
"""Descriptors that a group may take, with room to spare: in any case, and for each rank."""


def check_descriptors(rank: int, size: int) -> None:
    """Looks whether this process can open what a group takes."""
    wanted = DESCRIPTORS[0] + DESCRIPTORS[1] * size
    opened: list[int] = []
    try:
        while len(opened) < wanted:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise EngineError(
            f"rank {rank}/{size}: a group of {size} ranks may take {wanted} descriptors, but this "
            f"process can have only {len(opened)} more ({error.strerror}); raise ulimit -n, now "
            f"{limit}, or destroy groups that are not needed",
            errno=error.errno or 0,
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def refused(rank: int, size: int, cause: Exception) -> EngineError:
    """An error for all ranks, of what the system refused while a group was made."""
    code = getattr(cause, "errno", None)
    error = EngineError(
        f"rank {rank}/{size}: this process was refused what a group needs: {_reason(cause)}; is "
        f"it short of descriptors, threads or memory (ulimit -a)?",
        errno=code if isinstance(code, int) else 0,
    )
    error.__cause__ = cause
    return error


def is_memory(error: BaseException) -> bool:
    """True if ``error`` says that there is not enough memory: Python's, torch's or the engine's."""
    if isinstance(error, LossyError):
        return isinstance(error, EngineError) and error.code == Code.MEMORY
    lacks = "allocate memory", "out of memory", "pinned memory can't be had"
    return isinstance(error, MemoryError) or any(lack in str(error) for lack in lacks)


def not_submitted(endpoint: Endpoint, call: Collective, error: Exception) -> LossyError:
    """Makes what keeps this rank from submitting a call the failure of all ranks. The others would
    wait in vain for this rank to take part."""
    health = endpoint.health
    text = f"{health.where}: {call.numbered}"
    if is_memory(error):
        failure = EngineError(f"{text}: no memory for it: {_reason(error)}", code=Code.MEMORY)
    else:
        what = f"{type(error).__name__}: {_reason(error)}"
        failure = EngineError(f"{text}: this rank couldn't submit it: {what}")
    endpoint.fail(call, failure)
    first = health.failure or failure
    return failure if first is failure else first.again(call.numbered)


def _reason(cause: Exception) -> str:
    return (str(cause).splitlines() or [""])[0] or type(cause).__name__

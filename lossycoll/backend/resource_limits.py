"""What the system refuses a process: descriptors and memory, as errors that all ranks hear.

Where pyzmq and gloo are refused a descriptor they end the process, so a group looks before it is
made whether there are enough.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lossycoll.errors import Code, EngineError, LossyError

DESCRIPTORS: Final = (32, 4)
"""What a group may take, with room to spare: in any case, and for each rank."""

_Call = TypeVar("_Call", bound=Callable[..., Any])


def check_descriptors(rank: int, size: int) -> None:
    """Raises EngineError if this process can't open what a group of ``size`` ranks takes."""
    wanted = DESCRIPTORS[0] + DESCRIPTORS[1] * size
    held: list[int] = []
    try:
        while len(held) < wanted:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise EngineError(
            f"rank {rank}/{size}: a group of {size} ranks may take {wanted} descriptors, but this "
            f"process can have only {len(held)} more ({error.strerror}); raise ulimit -n, now "
            f"{limit}, or destroy groups that are not needed",
            errno=error.errno or 0,
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def refused(rank: int, size: int, cause: Exception) -> EngineError:
    """What the system refused while a group was made, as an error that the other ranks hear."""
    code = getattr(cause, "errno", None)
    error = EngineError(
        f"rank {rank}/{size}: this process was refused what a group needs: {_reason(cause)}; is "
        f"it short of descriptors, threads or memory (ulimit -a)?",
        errno=code if isinstance(code, int) else 0,
    )
    error.__cause__ = cause
    return error


def is_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there is not enough memory: Python's, torch's or the engine's."""
    if isinstance(error, LossyError):
        return isinstance(error, EngineError) and error.code == Code.MEMORY
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def told(method: _Call) -> _Call:
    """A collective of a process group whose want of memory becomes the failure of all ranks.

    The call has its number by then, and so the others would wait for this rank in vain.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        health = self._health
        before = health.seq
        try:
            return method(self, *args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not is_memory(error) or health.seq == before:
                raise
            failure = EngineError(
                f"{health.where}: call #{health.seq} {health.call_at(health.seq)}: no memory for "
                f"it: {_reason(error)}",
                code=Code.MEMORY,
            )
            health.fail(failure, tell=True)
            raise failure from error

    return call  # type: ignore[return-value]


def _reason(cause: Exception) -> str:
    return (str(cause).splitlines() or [""])[0] or type(cause).__name__

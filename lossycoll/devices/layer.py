"""Interface of a device to a call's way to host memory and back: streams, events, memory.

A stream does what it is given in order, some time later; an event is a place in a stream. All of
these return at once, unless they say that they wait.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from lossycoll.errors import EngineError


class DeviceError(EngineError):
    """A device, its driver, or memory that it reaches, can't be had or has failed."""


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Waits until the stream has come to it."""

    def is_done(self) -> bool:
        """True if the stream has completed its work."""


class Stream(Protocol):
    """Does what it is given, in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Does what ``work`` asks torch for. It is called at once, or when the stream is there."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies elements, in order, between host and device."""

    def record(self) -> Event:
        """The place after all that the stream was given until now."""

    def wait_for(self, event: Any) -> None:
        """Goes on when another stream has come to its event."""

    def call(self, function: int, argument: int) -> None:
        """Calls ``void function(void *)``, given by its address, in a thread of the device's."""

    def wait_for_word(self, address: int) -> None:
        """Goes on when 32 bits of host memory aren't 0. Only where ``Layer.waits_by_stream``."""


class Lane(NamedTuple):
    """Streams that one group's calls take, in the order of the calls.

    Calls of other groups take other lanes. Between groups ranks needn't agree on an order: if one
    lane had calls of two groups, in another order at each rank, all of them would wait.
    """

    to_host: Any  # Of copies to host memory
    to_device: Any  # Of copies from there that were queued ahead, in the order of the calls
    # Of copies from there that are queued when their operations have ended: they mustn't stand
    # behind others that wait
    at_end: Any
    futures: Any  # Of what futures wait for


class Layer(Protocol):
    """One device."""

    name: str  # torch's, such as "cuda:0"
    waits_by_stream: bool  # Whether a stream can wait for a word of memory

    def new_lane(self) -> Lane:
        """Streams that nobody else has."""

    def current(self) -> Any:
        """The stream on which the caller's kernels are queued."""

    def memory(self, nbytes: int) -> Tensor:
        """Host memory that the device reaches by itself."""

    def low_bits(self) -> Any:
        """Codec of floats in few bits there, with the functions of lowbit_kernels.py; None, with a
        line of the log, if there is none."""

    def aside(self, lane: Lane, tensor: Tensor) -> AbstractContextManager[None]:
        """Kernels that are queued inside don't hold back what the caller queues later. They come
        after what the caller has queued before."""

    def future(self) -> torch.futures.Future[Any]:
        """A future whose value may lie on the device."""

    def after(self, lane: Lane, event: Any) -> AbstractContextManager[None]:
        """Context in which a future's value becomes ready after ``event``; None: it is ready."""


class StreamOrder:
    """Order of a device's streams after the result of a call."""

    def __init__(
        self, layer: Layer, lane: Lane | None, end: Any = None, *, ahead: bool = False
    ) -> None:
        self.layer: Final = layer
        self.lane: Any = lane  # None: the result is there in the caller's own stream
        self.end = end  # The place after which it is there; None before that is known
        self.ahead: Final = ahead  # Whether streams can be ordered before the call is done

    def order_current(self) -> None:
        """Orders whatever the caller queues from now on after the result."""
        if self.end is not None:
            self.layer.current().wait_for(self.end)

    def after_end(self) -> AbstractContextManager[None]:
        """Context in which a future's value becomes ready after the result."""
        return nullcontext() if self.lane is None else self.layer.after(self.lane, self.end)


LEAST: Final = 4096
"""Bytes of the smallest piece."""


class HostMemory:
    """A pool of host memory that a device reaches: taken once, used again, never given back.

    Pieces have a few sizes, each a power of two or one and a half times that. What is given back to
    the driver while copies are under way may wait for all of them (NCCL's issue 48), and what is
    taken anew at every call costs more than the copy.

    ``make``: makes a piece of so many bytes, a uint8 tensor.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.pieces = 0
        """Number of pieces that were made."""

    def take(self, nbytes: int) -> Tensor:
        """A piece of ``nbytes`` or more, until :meth:`give_back`; its contents are anything."""
        size = size_of(nbytes)
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self.pieces += 1
        return self._make(size)

    def give_back(self, piece: Tensor) -> None:
        """Has the piece used again; nothing may read or write it any more."""
        with self._lock:
            self._free[piece.numel()].append(piece)


def size_of(nbytes: int) -> int:
    """The size of the piece that ``nbytes`` bytes get."""
    size = LEAST
    while size < nbytes:
        if size * 3 // 2 >= nbytes:
            return size * 3 // 2
        size *= 2
    return size

"""Gates: how a device and the engine tell each other that a buffer has been filled (lc_gate).

A gate is a few words of memory that both reach. Addresses are ints here; whoever made a gate keeps
its memory until the operation is done and the device has seen the end of it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

from lossycoll._native import ffi, lib
from lossycoll.errors import EngineError

GATE_BYTES: Final = 64
"""Room for one: a cache line, so that none shares it with another."""
OPENER: Final = int(ffi.cast("uintptr_t", ffi.addressof(lib, "lc_gate_open")))
"""Address of the C function that opens the gate at the address it is called with."""


class Wakers:
    """Descriptors by which gates wake one host's engine, closed with the last reference."""

    def __init__(self, handle: Any) -> None:
        found = ffi.new("int32_t[2]")
        if lib.lc_host_wakers(handle, found) < 0:
            raise EngineError(
                "this process can't open two descriptors more, by which a device wakes the engine; "
                "raise ulimit -n",
                errno=int(ffi.errno),
            )
        self.descriptors: Final = (int(found[0]), int(found[1]))
        weakref.finalize(self, _close, self.descriptors, os.getpid())


def shut(address: int, wakers: Wakers, spoiled: tuple[int, int] = (0, 0)) -> None:
    """Makes a gate that is shut. ``address``: of ``GATE_BYTES`` bytes, which no operation and no
    device looks at. ``spoiled``: address and bytes of what becomes NaN if the operation fails."""
    gate = ffi.cast("lc_gate *", address)
    gate.ready = gate.done = gate.failed = 0
    gate.wake[0], gate.wake[1] = wakers.descriptors
    gate.spoiled, gate.spoiled_bytes = ffi.cast("void *", spoiled[0]), spoiled[1]


def done_word(address: int) -> int:
    """Address of the 32 bits of a gate that become 1 when the operation's output may be read."""
    return address + int(ffi.offsetof("lc_gate", "done"))


def is_done(address: int) -> bool:
    return bool(ffi.cast("lc_gate *", address).done)


def _close(descriptors: tuple[int, int], owner: int) -> None:
    if os.getpid() == owner:
        for descriptor in descriptors:
            os.close(descriptor)

"""System calls that the kernel refuses a process from now on: a machine that lacks something."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARGUMENTS_AT = 0, 16
_NUMBERS = {
    "x86_64": {"memfd_create": 319, "fallocate": 285, "mmap": 9, "fcntl": 72},
    "aarch64": {"memfd_create": 279, "fallocate": 47, "mmap": 222, "fcntl": 25},
}
MACHINES = tuple(_NUMBERS)


@dataclass(frozen=True)
class Refused:
    """Calls of ``name`` fail with ``error`` if their ``arguments`` (32 bits each) are these."""

    name: str
    error: int = errno.ENOMEM
    arguments: Mapping[int, int] = field(default_factory=dict)


def refuse(call: Refused) -> None:
    """For the calling thread, and those that it starts; there is no way back.

    Raises OSError where the kernel can't filter system calls.
    """
    tests = [(_NUMBER_AT, _NUMBERS[platform.machine()][call.name])]
    tests += [(_ARGUMENTS_AT + 8 * place, value) for place, value in call.arguments.items()]
    code = b""
    for number, (offset, value) in enumerate(tests):
        to_the_end = 2 * (len(tests) - number) - 1
        code += struct.pack("=HBBI", _LOAD, 0, 0, offset)
        code += struct.pack("=HBBI", _EQUAL, 0, to_the_end, value)
    code += struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | call.error)
    code += struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, extra in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(option, value, extra, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

"""Builds ``lossycoll._native`` from the C sources beside this file (cffi, API mode).

``LOSSYCOLL_WERROR=1`` turns warnings into errors and ``LOSSYCOLL_CFLAGS`` adds
compiler flags; both are for developers.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADER = HERE / "lossycoll.h"


def declarations() -> str:
    """The part of lossycoll.h that is declared to cffi."""
    text = HEADER.read_text(encoding="utf-8")
    found = re.search(r"/\* cdef begin \*/(.*?)/\* cdef end \*/", text, re.DOTALL)
    if found is None:
        raise RuntimeError(f"{HEADER}: the cdef marks are gone")
    return found.group(1)


def flags() -> list[str]:
    out = ["-std=c11", "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
    if os.environ.get("LOSSYCOLL_WERROR") == "1":
        out.append("-Werror")
    return out + shlex.split(os.environ.get("LOSSYCOLL_CFLAGS", ""))


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "lossycoll._native",
    '#include "lossycoll.h"',
    # setuptools wants paths relative to setup.py, which runs one folder up.
    sources=sorted(f"native/{path.name}" for path in HERE.glob("*.c")),
    include_dirs=["native"],
    extra_compile_args=flags(),
    extra_link_args=["-pthread"],
)

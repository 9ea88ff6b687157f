"""Builds the C sources beside this file with cffi (API mode): ``lossycoll._native`` is the engine,
``lossycoll._lab`` the laboratory's switch, ``lossycoll._sim`` the network of simulations.

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


def declarations(header: Path) -> str:
    """The part of a header that is declared to cffi."""
    found = re.search(
        r"/\* cdef begin \*/(.*?)/\* cdef end \*/", header.read_text(encoding="utf-8"), re.DOTALL
    )
    if found is None:
        raise RuntimeError(f"{header}: the cdef marks are gone")
    return found.group(1)


def flags() -> list[str]:
    out = ["-std=c11", "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
    if os.environ.get("LOSSYCOLL_WERROR") == "1":
        out.append("-Werror")
    return out + shlex.split(os.environ.get("LOSSYCOLL_CFLAGS", ""))


def module(name: str, folder: str, *headers: str, also: tuple[str, ...] = ()) -> FFI:
    """The extension ``name`` of all C sources in ``folder`` and of ``also``, which declares its
    ``headers``."""
    made = FFI()
    for header in headers:
        made.cdef(declarations(HERE.parent / folder / header))
    made.set_source(
        name,
        "\n".join(f'#include "{header}"' for header in headers),
        # setuptools wants paths relative to setup.py, which runs one folder up.
        sources=[
            *sorted(f"{folder}/{path.name}" for path in (HERE.parent / folder).glob("*.c")),
            *also,
        ],
        # The modules share structures: one of an older header would write past another's memory.
        depends=sorted(f"native/{path.relative_to(HERE)}" for path in HERE.rglob("*.h")),
        include_dirs=[folder, "native"],
        extra_compile_args=flags(),
        extra_link_args=["-pthread", "-lm"],
    )
    return made


def parts(header: str) -> list[str]:
    """The headers that a header is made of, each above those that use it."""
    return re.findall(r'^#include "(\w+\.h)"', (HERE / header).read_text(encoding="utf-8"), re.M)


ffi = module("lossycoll._native", "native", *parts("lossycoll.h"), "step.h")
lab = module("lossycoll._lab", "native/lab", "links.h", "lab.h")
sim = module("lossycoll._sim", "native/sim", "../lab/links.h", "sim.h", also=("native/wire.c",))

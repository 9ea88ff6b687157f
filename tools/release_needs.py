"""Names what ``make release`` needs and this machine lacks, each with a remedy.

Tests skip where a program is missing; a release may not. Exit code 1: something is missing.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = "pip install -r requirements-release.txt"
LONG: Final = "pip install -r requirements-long.txt"
PROGRAMS: Final = {
    "aarch64-linux-gnu-gcc": "apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "qemu-aarch64": "apt install qemu-user",
    "musl-gcc": "apt install musl-tools",
    "clang": "apt install clang",
    "ip": "apt install iproute2",
    "nft": "apt install nftables",
    "chromium or chromium-browser": "apt install chromium",
    "redis-server or valkey-server": "apt install redis-server",
    "basedpyright": PACKAGES,
    "hadolint": PACKAGES,
}
"""Programs of which one suffices, and what installs it on Debian."""
MODULES: Final = {
    **dict.fromkeys(("abi3audit", "auditwheel", "elftools", "twine", "ziglang"), PACKAGES),
    **dict.fromkeys(("furo", "myst_parser", "playwright", "rattler_build"), PACKAGES),
    **dict.fromkeys(("prometheus_client", "promql_parser", "valkey", "yaml"), LONG),
}
"""Packages that tests import, and what installs them."""
BIN: Final = Path(sys.executable).parent


def found(program: str) -> bool:
    return any(shutil.which(program, path=path) for path in (str(BIN), None))


def importable(module: str) -> bool:
    return find_spec(module) is not None


def missing(
    has_program: Callable[[str], bool] = found, has_module: Callable[[str], bool] = importable
) -> Iterator[str]:
    """A line for each program and package that isn't there."""
    for names, remedy in PROGRAMS.items():
        if not any(map(has_program, names.split(" or "))):
            yield f"{names}: {remedy}"
    for module, remedy in MODULES.items():
        if not has_module(module):
            yield f"Python's {module}: {remedy}"


def main() -> int:
    lines = list(missing())
    for line in lines:
        print(f"missing: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

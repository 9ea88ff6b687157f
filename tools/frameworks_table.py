"""Versions and day in the table of docs/frameworks.md.

``python -m tools.frameworks_table`` writes the versions that are installed, and today: `make
test-frameworks` does so when all of its tests have passed. It refuses versions that aren't pinned.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "frameworks.md"
PACKAGES: Final = {
    "Transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "TRL": ("trl", "peft"),
    "Lightning": ("lightning",),
    "DeepSpeed": ("deepspeed",),
    "Ray": ("ray",),
    "torchft": ("torchft-nightly",),
    "FSDP2": ("torch",),
    "DTensor": ("torch",),
    "pipelines": ("torch",),
    "distributed checkpoints": ("torch",),
}
"""Packages of the table's rows, by how a row begins."""
WORDS: Final = {"torch": "torch ", "torchft-nightly": "nightly "}
"""Words before a package's version."""
ROW: Final = re.compile(r"^\| (?P<name>[^|]+) \| (?P<versions>[^|]+) \| (?P<day>[^|]+) \|", re.M)


def pins() -> dict[str, str]:
    """The versions that make installs, by package."""
    found: dict[str, str] = {}
    for name in ("dev", "long", "frameworks"):
        text = (ROOT / f"requirements-{name}.txt").read_text(encoding="utf-8")
        found |= dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    return found


def installed() -> dict[str, str]:
    """The versions that are there, without the builds of torch."""
    found = {}
    for package in {package for row in PACKAGES.values() for package in row}:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "none"
    return found


def packages_of(name: str) -> tuple[str, ...]:
    """The packages of the row that begins with ``name``."""
    (found,) = (packages for begin, packages in PACKAGES.items() if name.startswith(begin))
    return found


def filled(text: str, versions: Mapping[str, str], day: str) -> str:
    """The page with ``versions`` and ``day`` in every row of its first table."""

    def row(found: re.Match[str]) -> str:
        if found["name"] == "framework":
            return found[0]
        cells = ", ".join(WORDS.get(p, "") + versions[p] for p in packages_of(found["name"]))
        return f"| {found['name']} | {cells} | {day} |"

    table, mark, rest = text.partition("\n\n```")
    return ROW.sub(row, table) + mark + rest


def main() -> int:
    have, wanted = installed(), pins()
    if wrong := [name for name in sorted(have) if have[name] != wanted[name]]:
        told = ", ".join(f"{name} {have[name]} (wanted {wanted[name]})" for name in wrong)
        print(f"not the versions that make test-frameworks installs: {told}", file=sys.stderr)
        return 1
    day = time.strftime("%Y-%m-%d", time.gmtime())
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), have, day), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(PACKAGES)} rows of {day}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

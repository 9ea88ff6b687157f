"""Versions that the installed package admits, by its own metadata.

``packaging`` would read this, but isn't among what torch or this package installs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from typing import Final

PACKAGE: Final = "lossycoll"
_CLAUSE: Final = re.compile(r"(~=|>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")
_VERSION: Final = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?P<before>[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?\d*)?"
    r"(?P<rest>[-_.+].*|post.*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Admitted:
    """A range of versions, as in ``>=2.13,<2.15``; empty text for any."""

    text: str

    def admits(self, version: str) -> bool:
        """True if ``version`` (2.13.0+cpu, say) is in the range.

        A pre-release or development version (2.13.0rc1) comes before its release. It isn't in
        ``<2.13`` either, as in PEP 440. Post-releases and local versions count as their release.
        """
        clauses = [part.strip() for part in self.text.split(",") if part.strip()]
        return all(_holds(clause, version) for clause in clauses)


def torch_versions() -> Admitted:
    """The versions of torch that the package may be installed with."""
    for line in metadata.requires(PACKAGE) or ():
        found = re.fullmatch(r"torch\b\s*\(?([^;()]*)\)?\s*(;.*)?", line)
        if found:
            return Admitted(found[1].strip())
    raise LookupError(f"the metadata of {PACKAGE} requires no torch; install the package again")


def python_versions() -> Admitted:
    """The versions of Python that the package may be installed with."""
    return Admitted(metadata.metadata(PACKAGE)["Requires-Python"] or "")


def _holds(clause: str, version: str) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None or (found[3] and found[1] not in ("==", "!=")):
        raise ValueError(f"the version range {clause!r} is none that the doctor can read")
    wanted = [int(part) for part in found[2].split(".")]
    release, before = _read(version)
    order = _compare(release, wanted)
    same = order == 0 and not before
    return {
        "==": _starts(release, wanted) if found[3] else same,
        "!=": not (_starts(release, wanted) if found[3] else same),
        "~=": (order > 0 or same) and _starts(release, wanted[:-1]),
        ">=": order > 0 or same,
        "<=": order <= 0,
        ">": order > 0,
        "<": order < 0,
    }[found[1]]


def _read(version: str) -> tuple[list[int], bool]:
    """(release number, whether ``version`` comes before that release)."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise ValueError(f"the version {version!r} can't be read")
    before = bool(found["before"]) or ".dev" in (found["rest"] or "").partition("+")[0]
    return [int(part) for part in found["release"].split(".")], before


def _compare(one: list[int], other: list[int]) -> int:
    """-1, 0 or 1, as ``one`` is less, equal or greater. 2.13 and 2.13.0 are equal."""
    for left, right in zip_longest(one, other, fillvalue=0):
        if left != right:
            return -1 if left < right else 1
    return 0


def _starts(release: list[int], prefix: list[int]) -> bool:
    padded = release + [0] * (len(prefix) - len(release))
    return padded[: len(prefix)] == prefix

"""What a mutation is: one defect, made on purpose, that a named test has to notice."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "tests/runtime/engine"
PROTOCOL = "tests/runtime/world/test_world_protocol.py"
P2P = "tests/runtime/collectives/test_point_to_point.py"
LOSSY_P2P = "tests/backend/test_lossy_point_to_point.py"


@dataclass(frozen=True)
class Edit:
    """``before`` stands exactly once in ``file`` (from the repository's root)."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutation:
    """One defect.

    Args:
        name: What is wrong, in a few words.
        edits: What makes it so.
        test: Who must fail: ``tests/....py::name``, or ``native:program`` for a program of
            tests/native.
        seconds: The longest that test may take to fail, on an idle machine.
        hangs: Whether the defect is noticed by a test that doesn't end. Without it, a test that
            hangs has noticed nothing.
    """

    name: str
    edits: tuple[Edit, ...]
    test: str
    seconds: float = 60.0
    hangs: bool = False


def mutation(
    name: str,
    file: str,
    before: str,
    after: str,
    test: str,
    seconds: float = 60.0,
    hangs: bool = False,
) -> Mutation:
    """One with a single edit."""
    return Mutation(name, (Edit(file, before, after),), test, seconds, hangs)

"""The mutations of tests/mutations fit the tree: ``make mutate`` finds what it is to break."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.model import Mutation
from tests.mutations.table import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits(mutation: Mutation) -> None:
    for edit in mutation.edits:
        text = (ROOT / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.before) == 1, f"{edit.file} has it {text.count(edit.before)} times"
        assert edit.after != edit.before
        if edit.file.endswith(".py") and len(mutation.edits) == 1:
            compile(text.replace(edit.before, edit.after), edit.file, "exec")
    kind, _, program = mutation.test.rpartition(":")
    if kind == "native":
        assert (ROOT / "tests" / "native" / f"{program}.c").exists()
        return
    file, _, name = mutation.test.partition("::")
    name = name.partition("[")[0]
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_each_has_a_name_of_its_own() -> None:
    assert len(MUTATIONS) >= 30
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1

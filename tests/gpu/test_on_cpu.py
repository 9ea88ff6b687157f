"""The tables that can do without a GPU, on CPU tensors: what they want is right."""

from __future__ import annotations

import pytest

from tests.gpu.runner import run_table


@pytest.mark.in_clear
@pytest.mark.parametrize(
    "module",
    [
        "collectives",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("failures", "losses", "methods", "training")
        ),
    ],
)
def test_what_the_checks_want_holds_for_cpu_tensors(module: str) -> None:
    found = run_table(f"tests.gpu.{module}", device="cpu", env={"LOSSYCOLL_LOG": "off"})
    bad = {name: one.errors for name, one in found.items() if any(one.errors.values())}
    assert not bad
    assert any(one.errors for one in found.values()), "nothing was run"

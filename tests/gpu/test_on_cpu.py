"""The tables that can do without a GPU, on CPU tensors: what they want is right."""

from __future__ import annotations

import pytest

from tests.gpu.runner import SAMPLE, run_table


@pytest.mark.in_clear
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("collectives", SAMPLE[::2]),  # all of it is tried on a fake device
        *(
            pytest.param(name, None, marks=pytest.mark.long)
            for name in ("collectives", "failures", "losses", "methods", "training")
        ),
    ],
)
def test_what_the_checks_want_holds_for_cpu_tensors(
    module: str, names: tuple[str, ...] | None
) -> None:
    env = {"LOSSYCOLL_LOG": "off"}
    found = run_table(f"tests.gpu.{module}", device="cpu", env=env, names=names)
    bad = {name: one.errors for name, one in found.items() if any(one.errors.values())}
    assert not bad
    assert any(one.errors for one in found.values()), "nothing was run"

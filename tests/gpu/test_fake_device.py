"""The tables on a fake device: streams that are threads, with delays, and poisoned host memory.

It has the two ways in which a wait ends: by streams that wait for a word of memory, and by the host
that waits for the operation.
"""

from __future__ import annotations

import pytest

from tests.gpu.runner import FAKE, run_table

SAMPLE = (
    "all_reduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "uneven_all_gather",
    "coalesced",
    "sparse",
    "point_to_point",
    "blocks",
)


@pytest.mark.in_clear
@pytest.mark.parametrize("waits", ["stream", "host"])
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("collectives", SAMPLE),
        *(
            pytest.param(name, None, marks=pytest.mark.long)
            for name in ("collectives", "failures", "losses", "training")
        ),
    ],
)
def test_what_the_checks_want_holds_on_a_fake_device(
    module: str, names: tuple[str, ...] | None, waits: str
) -> None:
    env = {"LOSSYCOLL_LOG": "off", FAKE: waits}
    found = run_table(f"tests.gpu.{module}", device="cpu", env=env, names=names)
    bad = {name: one.errors for name, one in found.items() if any(one.errors.values())}
    assert not bad
    assert any(one.errors for one in found.values()), "nothing was run"

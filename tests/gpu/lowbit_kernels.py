"""Packets in few bits that kernels make and read on the device, against the C codec: more of what
tests/devices/test_lowbit_kernels.py has in an interpreter. Ranks share the formats.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
import torch

from lossycoll.plan.codec import GROUPS, PLANES, LowBit
from tests.gpu.checks import Check, Rank, Table
from tests.support.lowbit_packets import (
    DRAWS,
    FORMATS,
    KEY,
    Layout,
    in_c,
    mixed,
    narrow,
    of_kind,
    random_bytes,
    wrongly_decoded,
    wrongly_encoded,
)

TABLE = Table()
SIZES = (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 127, 128, 129, 255, 257, 511, 513, 1000, 1025, 5000)
LARGEST_PACKET = 65024
"""Bytes."""
BATCH = 400
"""Packets of 1400 bytes."""


def _wrong(how: LowBit, device: str) -> list[str]:
    rng = np.random.default_rng(how.bits)
    wrong = []
    for kind in DRAWS:
        wrong += wrongly_encoded(how, [of_kind(rng, kind, n) for n in SIZES], device)
    wrong += wrongly_encoded(how, [narrow(rng, how, 1000)], device)
    large, usual = how.elements(LARGEST_PACKET), how.elements(1400)
    for run in (*GROUPS, 16):
        parts = [mixed(rng, n, run) for n in (large, large - 1, *SIZES, *[usual] * BATCH)]
        wrong += wrongly_encoded(how, parts, device)
    made = [(len(part), in_c(how, part, KEY)) for part in parts]
    wrong += wrongly_decoded(how, made, device)
    noise = [random_bytes(how, rng, n) for n in (large, *SIZES, *[usual] * BATCH)]
    return [*wrong, *wrongly_decoded(how, noise, device)]


def _like_c(bits: int, rank: Rank) -> None:
    _needs_triton()
    formats = [how for how in FORMATS if how.bits == bits]
    wrong = [text for how in formats[rank.rank :: rank.world] for text in _wrong(how, rank.device)]
    assert not wrong, "\n".join(wrong)


def _needs_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")


for _bits in PLANES:
    TABLE.add(Check(f"int{_bits}_like_the_c_codec", partial(_like_c, _bits), cuda=True))


@TABLE.check(cuda=True)
def kernels_are_queued_on_the_current_stream(rank: Rank) -> None:
    """Encoded on one stream and decoded there, behind a kernel that takes long."""
    _needs_triton()
    from lossycoll.devices import lowbit_kernels

    how, n = LowBit(8, 128), 1 << 20
    layout = Layout.of(how, [n])
    values = torch.zeros(layout.elements, device=rank.device)
    packets, got = layout.packets(rank.device), torch.zeros_like(values)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8, device=rank.device)

    def there_and_back() -> None:
        lowbit_kernels.encode(values, packets, data, how, most_elements=n)
        lowbit_kernels.decode(data, packets, got, how, most_elements=n)

    there_and_back()  # which compiles
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        values.fill_(3.0)
        there_and_back()
        side.synchronize()
    first = layout.rows[0][0]
    assert (got[first : first + n] == 3.0).all()

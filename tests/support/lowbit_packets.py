"""Packets of floats in few bits for the kernels of a device, and what the C codec makes of them.

Whoever imports Triton decides before that whether its kernels are interpreted, so the kernels are
imported where they are called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lossycoll.plan.codec import GROUPS, PLANES, ROUNDINGS, Bytes, Floats, LowBit, named
from lossycoll.runtime.engine import codecs
from tests.oracle import lowbit

FORMATS = tuple(
    LowBit(bits, group, spikes, stochastic)
    for bits, group, spikes, stochastic in itertools.product(
        PLANES, GROUPS, (False, True), (False, True)
    )
)
LARGEST = np.finfo(np.float32).max
KEY, COUNTER = 0xDEADBEEF, 0xFFFFFF00
"""Of what is drawn: counters pass 2^32."""
BETWEEN = 3
"""Bytes between packets, so that none is aligned."""
UNTOUCHED = 0xA5
"""In all bytes that are nobody's."""

Rng = np.random.Generator
Draw = Callable[[Rng, int], np.ndarray]


def name_of(how: LowBit) -> str:
    """The encoding's name, with its parameters."""
    return named(f"int{how.bits}", how.group, how.spikes, ROUNDINGS[how.stochastic])


def _patterns(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)


def _finite(rng: Rng, n: int) -> np.ndarray:
    x = _patterns(rng, n)
    return np.where(np.isfinite(x), x, np.float32(1))


def _cuts(rng: Rng, n: int) -> np.ndarray:
    """What spikes are cut to, and what lies next to it."""
    bits = rng.standard_normal(n).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFF00)
    found: Floats = (bits | rng.choice(np.array([0, 1, 255], np.uint32), n)).view(np.float32)
    return found


def _with(value: float) -> Draw:
    """A normal group with such an element in some place."""

    def draw(rng: Rng, n: int) -> np.ndarray:
        x = rng.standard_normal(n)
        x[rng.integers(n)] = value
        return x

    return draw


DRAWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "constant": lambda rng, n: np.full(n, rng.standard_normal()),
    "zeros": lambda rng, n: np.zeros(n),
    "negative zeros": lambda rng, n: np.full(n, -0.0),
    "both zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "denormals": lambda rng, n: rng.integers(-(1 << 22), 1 << 22, n) * 2.0**-149,
    "least denormals": lambda rng, n: rng.integers(-2, 3, n) * 2.0**-149,
    "among denormals": lambda rng, n: rng.standard_normal(n) * 2.0**-126,
    "huge": lambda rng, n: rng.uniform(-1, 1, n) * LARGEST,
    "the largest": lambda rng, n: rng.choice([-LARGEST, LARGEST, 0.0], n),
    "positive": lambda rng, n: rng.uniform(1, 1.001, n) * 1e20,
    "negative": lambda rng, n: -rng.exponential(size=n),
    "two numbers": lambda rng, n: rng.choice([-1.0, 1.0], n),
    "one alone": lambda rng, n: np.arange(n) == rng.integers(n),
    "outliers": lambda rng, n: rng.standard_normal(n) * np.where(rng.random(n) < 0.05, 1e3, 1),
    "all sizes": lambda rng, n: rng.standard_normal(n) * 2.0 ** rng.integers(-140, 100, n),
    "ties": lambda rng, n: rng.integers(-255, 256, n) / 2,
    "cuts": _cuts,
    "finite patterns": _finite,
    "patterns": _patterns,
    "nan": _with(np.nan),
    "infinity": _with(np.inf),
    "minus infinity": _with(-np.inf),
}
"""By name: elements of a kind, which are rounded to float32."""


def mixed(rng: Rng, n: int, run: int) -> Floats:
    """``n`` elements, by runs of so many of a kind."""
    kinds = list(DRAWS.values())
    parts = [kinds[rng.integers(len(kinds))](rng, run) for _ in range(-(-n // run))]
    with np.errstate(over="ignore"):
        found: Floats = np.concatenate([p.astype(np.float32) for p in parts])[:n]
    return found


def of_kind(rng: Rng, name: str, n: int) -> Floats:
    """``n`` elements of one of :data:`DRAWS`."""
    return DRAWS[name](rng, n).astype(np.float32)


def narrow(rng: Rng, how: LowBit, groups: int) -> Floats:
    """Elements of groups whose steps are little more than two units, the least there are: there
    ends lie farthest off their grids."""
    width = 2.0 ** (how.bits - 13) * rng.uniform(1, 2, (groups, 1))
    rows = rng.choice([-1.0, 1.0], (groups, 1)) * (1 + width * rng.random((groups, how.group)))
    found: Floats = rows.astype(np.float32).reshape(-1)
    return found


def in_c(how: LowBit, x: Floats, seed: int) -> Bytes:
    """The bytes of a packet, by the engine's codec."""
    out = np.empty(how.wire_bytes(len(x)), np.uint8)
    codecs.encode(how, np.ascontiguousarray(x), out, seed)
    return out


def back_in_c(how: LowBit, data: Bytes, n: int) -> Floats:
    """The elements of a packet, by the engine's codec."""
    out = np.empty(n, np.float32)
    codecs.decode(how, np.ascontiguousarray(data), out)
    return out


def groups_of_none(how: LowBit, x: Floats) -> int:
    """How many groups of a packet have a NaN or an infinity."""
    starts = range(0, len(x), how.group)
    return sum(not np.isfinite(x[at : at + how.group]).all() for at in starts)


@dataclass(frozen=True)
class Layout:
    """Where packets lie, with elements and bytes between them that are nobody's.

    Attributes:
        rows: By packet: first element, elements, first byte.
        elements: Of all, and of what lies between.
        nbytes: The same.
    """

    rows: list[tuple[int, int, int]]
    elements: int
    nbytes: int

    @classmethod
    def of(cls, how: LowBit, sizes: Iterable[int]) -> Layout:
        rows, first, byte = [], 1, BETWEEN
        for n in sizes:
            rows.append((first, n, byte))
            first += n + 1
            byte += how.wire_bytes(n) + BETWEEN
        return cls(rows, first, byte)

    @property
    def most(self) -> int:
        return max(n for _, n, _ in self.rows)

    def packets(self, device: str) -> torch.Tensor:
        return torch.tensor(self.rows, dtype=torch.int64, device=device)


def wrongly_encoded(
    how: LowBit, parts: Sequence[Floats], device: str, *, numpy: bool = False
) -> list[str]:
    """What kernels and the C codec, and numpy's if asked for, make of parts otherwise.

    Each of ``parts`` is a packet's elements.
    """
    from lossycoll.devices import lowbit_kernels

    layout = Layout.of(how, map(len, parts))
    values = np.full(layout.elements, np.nan, np.float32)
    for (first, n, _), part in zip(layout.rows, parts, strict=True):
        values[first : first + n] = part
    wanted = np.full(layout.nbytes, UNTOUCHED, np.uint8)
    wrong = []
    for first, n, byte in layout.rows:
        x = values[first : first + n]
        seed = KEY << 32 | ((COUNTER + first) & 0xFFFFFFFF)
        wanted[byte : byte + how.wire_bytes(n)] = in_c(how, x, seed)
        if numpy and lowbit.encode(how, x, seed).tobytes() != in_c(how, x, seed).tobytes():
            wrong.append(f"{name_of(how)}: numpy encodes {n} elements otherwise")
    got = torch.full((layout.nbytes,), UNTOUCHED, dtype=torch.uint8, device=device)
    count = lowbit_kernels.encode(
        *(torch.from_numpy(values).to(device), layout.packets(device), got, how),
        most_elements=layout.most,
        key=KEY,
        counter=COUNTER,
    )
    none = sum(groups_of_none(how, part) for part in parts)
    if count.tolist() != [none]:
        wrong.append(f"{name_of(how)}: {count.tolist()} groups became NaN, wanted {none}")
    bad = np.flatnonzero(got.cpu().numpy() != wanted)
    if len(bad):
        wrong.append(f"{name_of(how)}: {len(bad)} bytes differ, first {_where(how, layout, bad)}")
    return wrong


def _where(how: LowBit, layout: Layout, bad: np.ndarray) -> str:
    """Which packet the first of these bytes belongs to."""
    for first, n, byte in layout.rows:
        if byte <= bad[0] < byte + how.wire_bytes(n):
            return f"byte {bad[0] - byte} of {n} elements from {first} on"
    return f"byte {bad[0]}, which is nobody's"


def wrongly_decoded(
    how: LowBit, packets: Sequence[tuple[int, Bytes]], device: str, *, numpy: bool = False
) -> list[str]:
    """The same of decoding. ``packets``: how many elements, and their bytes, by packet."""
    from lossycoll.devices import lowbit_kernels

    layout = Layout.of(how, (n for n, _ in packets))
    data = np.full(layout.nbytes, UNTOUCHED, np.uint8)
    wanted = np.full(layout.elements, -7.0, np.float32)
    got = torch.from_numpy(wanted.copy()).to(device)
    wrong = []
    for (first, n, byte), (_, each) in zip(layout.rows, packets, strict=True):
        data[byte : byte + len(each)] = each
        wanted[first : first + n] = back_in_c(how, each, n)
        if numpy and lowbit.decode(how, each, n).tobytes() != wanted[first : first + n].tobytes():
            wrong.append(f"{name_of(how)}: numpy decodes {n} elements otherwise")
    lowbit_kernels.decode(
        *(torch.from_numpy(data).to(device), layout.packets(device), got, how),
        most_elements=layout.most,
    )
    bad = np.flatnonzero(got.cpu().numpy().view(np.uint32) != wanted.view(np.uint32))
    if len(bad):
        at = bad[0]
        pair = f"{got[at].item()!r}, wanted {wanted[at]!r}"
        wrong.append(f"{name_of(how)}: {len(bad)} of {len(wanted)} differ, first {at}: {pair}")
    return wrong


def random_bytes(how: LowBit, rng: Rng, n: int) -> tuple[int, Bytes]:
    """A packet that no encoder made, with some groups that are one float."""
    data = rng.integers(0, 256, how.wire_bytes(n), np.uint8)
    groups = how.groups(n)
    exponents = len(data) - groups * (9 if how.spikes else 1)  # then the spikes' eight bytes
    data[exponents : exponents + groups : 3] = 255
    return n, data

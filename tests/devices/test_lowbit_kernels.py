"""Packets in few bits that Triton's kernels make and read: the bytes and bits of the C codec.

The kernels run in Triton's interpreter, on the CPU; tests/gpu/lowbit_kernels.py has more, on a GPU.
Triton reads when it is imported whether it interprets, so each run is in processes of its own.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lossycoll.plan.codec import GROUPS, LowBit
from tests.support.harness import run_good
from tests.support.lowbit_packets import (
    DRAWS,
    FORMATS,
    in_c,
    mixed,
    name_of,
    narrow,
    of_kind,
    random_bytes,
    wrongly_decoded,
    wrongly_encoded,
)

pytestmark = [
    pytest.mark.timeout(600),  # the interpreter is slow, and slower on a busy machine
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs Triton, which torch's CPU builds come without",
    ),
]

SIZES = (1, 2, 31, 33, 127, 129)
LONG = 1000
LONGEST = 5000
"""Of a packet in one format of several: the interpreter takes 10 ms for 512 elements."""
WORLD = 2
QUIET = {"LOSSYCOLL_LOG": "off"}


def _wrong(turn: int, how: LowBit) -> list[str]:
    """What the interpreter makes of one format otherwise than C and numpy."""
    rng = np.random.default_rng(turn)
    kinds = list(DRAWS)
    parts = [of_kind(rng, kinds[(turn + i) % len(kinds)], n) for i, n in enumerate(SIZES)]
    long = LONGEST if turn % 8 == 0 else LONG
    parts.append(mixed(rng, long, GROUPS[turn // 2 % 2]))
    parts.append(narrow(rng, how, 8))
    made = [(len(part), in_c(how, part, turn)) for part in parts]
    noise = [random_bytes(how, rng, n) for n in (*SIZES, LONG)]
    return [
        *wrongly_encoded(how, parts, "cpu", numpy=True),
        *wrongly_decoded(how, made, "cpu", numpy=True),
        *wrongly_decoded(how, noise, "cpu", numpy=True),
    ]


def rank_compares(rank: int, world: int) -> dict[str, list[str]]:
    """By format: what is wrong. Ranks share the formats."""
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy says what overflows, a GPU doesn't
    turns = list(enumerate(FORMATS))[rank::world]
    return {name_of(how): _wrong(turn, how) for turn, how in turns}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    env = {**QUIET, "TRITON_INTERPRET": "1"}
    found = run_good(rank_compares, WORLD, env, timeout=500, fresh=True)
    return {name: wrong for by_name in found for name, wrong in by_name.items()}


@pytest.mark.parametrize("name", [name_of(how) for how in FORMATS])
def test_kernels_do_as_the_c_codec(interpreted: dict[str, list[str]], name: str) -> None:
    assert interpreted[name] == []


def rank_passes_what_can_not_be(rank: int, world: int) -> list[str]:
    """What is said to each."""
    from lossycoll.devices import lowbit_kernels as kernels

    how, values = LowBit(4, 32), torch.zeros(64)
    packets, room = torch.tensor([[0, 64, 0]]), torch.zeros(100, dtype=torch.uint8)
    said = []
    for given in (
        (values.double(), packets, room, how, 64),
        (torch.zeros(128)[::2], packets, room, how, 64),
        (values, packets.int(), room, how, 64),
        (values, packets[0], room, how, 64),
        (values, packets, room.char(), how, 64),
        (values, packets, room, LowBit(7, 32), 64),
        (values, packets, room, LowBit(4, 64), 64),
        (values, packets, room, how, 1 << 40),
    ):
        floats, rows, data, made_by, most = given
        with pytest.raises(ValueError, match="wanted"):
            kernels.encode(floats, rows, data, made_by, most_elements=most)
        with pytest.raises(ValueError, match="wanted") as caught:
            kernels.decode(data, rows, floats, made_by, most_elements=most)
        said.append(str(caught.value))
    # Nothing to do is no error.
    assert kernels.encode(values, packets[:0], room, how, most_elements=64).item() == 0
    assert kernels.encode(values, packets, room, how, most_elements=0).item() == 0
    kernels.decode(room, packets[:0], values, how, most_elements=64)
    return said


def test_what_can_not_be_is_refused() -> None:
    env = {**QUIET, "TRITON_INTERPRET": "1"}
    (said,) = run_good(rank_passes_what_can_not_be, 1, env, fresh=True)
    assert "torch.float64" in said[0]
    assert "contiguous: False" in said[1]
    assert "7 bits" in said[5]


def rank_compiles(rank: int, world: int) -> dict[str, str]:
    """PTX by kernel, of one format and of another with all that there is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lossycoll.devices import lowbit_kernels as kernels

    made = {}
    pointers = {"values": "*fp32", "packets": "*i64", "data": "*u8"}
    counts = {"nan_groups": "*i32", "counter": "i32", "key": "i32"}
    for how in (LowBit(4, 128), LowBit(3, 32, True, True)):
        for kernel, more in ((kernels._encode, counts), (kernels._decode, {})):
            constants = kernels._constants(how, 512)
            options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
            if more:
                constants["STOCHASTIC"] = how.stochastic
            types = {**pointers, **more, **dict.fromkeys(constants, "constexpr")}
            signature = {name: types[name] for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            made[f"{name_of(how)} {kernel.__name__}"] = code.asm["ptx"]
    return made


def test_a_gpu_rounds_each_operation_and_keeps_denormals(tmp_path: Path) -> None:
    """Compiling needs no GPU. Sums and products are rounded one by one, quotients as by IEEE 754,
    and nothing is flushed to zero: but by quotients with Triton 3.4, of which none is that small.
    """
    env = {**QUIET, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    (made,) = run_good(rank_compiles, 1, env, fresh=True)
    quotients = {"div.rn.f32", "div.rn.ftz.f32"}
    for name, ptx in made.items():
        found = set(re.findall(r"\b[a-z]\w*(?:\.\w+)*\.f32\b", ptx))
        assert {"mul.rn.f32", "sub.rn.f32"} <= found, name
        assert bool(found & quotients) == ("_encode" in name)
        loose = [one for one in found if re.match(r"fma|mad|.*\.(ftz|approx|full)\b", one)]
        assert {*loose} <= quotients, name
    assert len(made) == 4

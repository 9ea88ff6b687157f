"""What the tables of backend/test_surface.py are made of: data that every rank can compute,
tensors that lie in memory in every way, calls in every mode, and what reductions must give.

Data and what is wanted are on the CPU; what a call is given is on the kit's device (tests/gpu).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = SIGNED + UNSIGNED
COMPLEX = (torch.complex64, torch.complex128)
FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
SUMMABLE = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
EVERY = (*SUMMABLE, *FP8)

LAYOUTS = ("dense", "slice", "strided", "transposed", "leaf", "scalar", "empty", "long")
SHAPES = {"scalar": (), "empty": (4, 0), "long": (1031, 3)}
MODES = ("sync", "async", "future")

Op = dist.ReduceOp


def data(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Integers of all bits; of the other types whole numbers whose sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in INTEGERS:
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
        return bits.to(torch.uint8).view(dtype).reshape(shape)
    values = torch.randint(1, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), 3.0 - values.double()).to(dtype)
    return (values if dtype in FP8 else values - 2 * (values % 2)).float().to(dtype)


def raw(tensor: Tensor) -> Tensor:
    """Shape (n,), uint8: the elements in order."""
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def reduced(rows: list[Tensor], op: Any) -> Tensor:
    """``op`` of one tensor per rank, by numpy, in a wide type; integers wrap."""
    dtype = rows[0].dtype
    if dtype == torch.bool:
        words = {Op.SUM: "or", Op.MAX: "or", Op.BOR: "or", Op.BXOR: "xor"}
        function: Any = getattr(np, f"logical_{words.get(op, 'and')}")
    else:
        function = {
            Op.SUM: np.add,
            Op.AVG: np.add,
            Op.PRODUCT: np.multiply,
            Op.MIN: np.minimum,
            Op.MAX: np.maximum,
            Op.BAND: np.bitwise_and,
            Op.BOR: np.bitwise_or,
            Op.BXOR: np.bitwise_xor,
        }[op]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    arrays = [row if dtype in (*INTEGERS, torch.bool) else row.to(wide) for row in rows]
    total = torch.from_numpy(np.asarray(reduce(function, [array.numpy() for array in arrays])))
    if op == Op.AVG and dtype in INTEGERS:  # as NCCL does: toward zero
        exact = [int(value) for value in total.flatten().tolist()]
        means = [(abs(value) // len(rows)) * (1 if value > 0 else -1) for value in exact]
        return torch.from_numpy(np.array(means, dtype=total.numpy().dtype)).view(total.shape)
    return (total / len(rows) if op == Op.AVG else total).to(dtype)


def operations(dtype: torch.dtype) -> tuple[Any, ...]:
    """What torch lets through for a type, and what has a meaning."""
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)
    if dtype in FLOATS:
        return (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
    exact = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)
    return exact if dtype == torch.bool else (*exact, Op.AVG)


class Kit:
    """One case at one rank: its type, layout and mode, and checks of what it has handed out."""

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        dtype: torch.dtype,
        layout: str,
        mode: str,
        group: Any = None,
        device: str = "cpu",
    ) -> None:
        self.rank = rank
        self.world = world
        self.dtype = dtype
        self.layout = layout
        self.mode = mode
        self.group = group
        self.device = torch.device(device)
        self.shape = SHAPES.get(layout, (6, 35))
        self._bases: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def values(self, seed: int, shape: tuple[int, ...] | None = None) -> Tensor:
        return data(self.shape if shape is None else shape, self.dtype, seed)

    def here(self, values: Tensor) -> Tensor:
        """The same on the device of the case, strides included."""
        if self.device.type == "cpu":
            return values
        there = torch.empty(0, dtype=values.dtype, device=self.device)
        memory = values.untyped_storage().to(device=self.device)
        there.set_(memory, values.storage_offset(), values.shape, values.stride())
        return there

    def source(self, values: Tensor) -> Tensor:
        """An input: laid out as the case wants it, and looked after."""
        return self._laid(values, fixed=True)

    def target(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """An output, filled with something else."""
        return self._laid(self.values(99, shape), fixed=False)

    def in_place(self, values: Tensor) -> Tensor:
        return self._laid(values, fixed=False)

    def run(self, call: Callable[..., Any], *args: Any, **rest: Any) -> None:
        work = call(*args, group=self.group, async_op=self.mode != "sync", **rest)
        if self.mode == "async":
            work.wait()
        elif self.mode == "future":
            # Some of torch's functions return the future itself.
            getattr(work, "get_future", lambda: work)().wait()

    def same(self, got: Tensor, want: Tensor, what: object = "") -> None:
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        assert got.shape == want.shape, (got.shape, want.shape)
        assert torch.equal(raw(got).cpu(), raw(want).cpu()), (
            f"{what}: got {got.flatten()[:8]}, want {want.flatten()[:8]}"
        )

    def near(self, got: Tensor, want: Tensor) -> None:
        if self.dtype in INTEGERS:
            self.same(got.detach(), want)
            return
        rtol = 2e-2 if torch.finfo(self.dtype).bits == 16 else 1e-6
        torch.testing.assert_close(got.detach().cpu(), want.cpu(), rtol=rtol, atol=1e-6)

    def finish(self) -> None:
        """No input has changed, and nothing beside the outputs."""
        for base, before, view in self._bases:
            if view is not None:
                part = before.as_strided(view.shape, view.stride(), view.storage_offset())
                part.copy_(view.detach())
            assert torch.equal(raw(base), raw(before)), "memory beside the outputs was changed"

    def _laid(self, values: Tensor, *, fixed: bool) -> Tensor:
        shape, n = tuple(values.shape), values.numel()
        base = data((2 * n + 20,), self.dtype, 77).to(self.device)
        if self.layout == "slice":
            view = base[7 : 7 + n].view(shape)
        elif self.layout == "strided":
            view = base.as_strided(shape, [2 * step for step in values.stride()], 3)
        elif self.layout == "transposed":
            view = base[5 : 5 + n].view(shape[::-1]).permute(*reversed(range(len(shape))))
        else:
            base = view = values.clone().to(self.device)
        view.copy_(values)
        if self.layout == "leaf" and self.dtype in (*FLOATS, *COMPLEX):
            view.requires_grad_()
        self._bases.append((base, base.detach().clone(), None if fixed else view))
        return view


class Table:
    """Runs many cases on one rank and remembers failures. ``every``: one of so many kits runs."""

    def __init__(self, rank: int, world: int, every: int = 1, device: str = "cpu") -> None:
        self.device = device
        self.rank = rank
        self.world = world
        self.turn = 0
        self._every = every
        self.done = 0
        self.failures: list[str] = []

    def case(self, name: str, run: Callable[[], None]) -> None:
        self.done += 1
        try:
            run()
        except (Exception, pytest.fail.Exception) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            self.failures.append(f"{name}: {type(error).__name__} at {place}: {error}"[:600])

    def kit(
        self,
        name: str,
        run: Callable[[Kit], None],
        dtype: torch.dtype = torch.float32,
        layout: str = "dense",
        group: Any = None,
    ) -> None:
        """One case in the mode whose turn it is."""
        self.turn += 1
        if self.turn % self._every:
            return
        mode = MODES[self.turn % len(MODES)]
        kit = Kit(
            *(self.rank, self.world),
            dtype=dtype,
            layout=layout,
            mode=mode,
            group=group,
            device=self.device,
        )

        def whole() -> None:
            run(kit)
            kit.finish()

        self.case(f"{name} {str(dtype).removeprefix('torch.')} {layout} {mode}", whole)

"""A training's state as bytes, and from one rank to all: its tensors one after another, and a
skeleton that says what they are. The skeleton is JSON, so reading a peer's runs no code of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lossycoll.errors import CheckpointError
from lossycoll.options.scopes import reliable

Bytes: TypeAlias = NDArray[np.uint8]
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
MOST_DEPTH: Final = 16


def packed(state: Any) -> tuple[bytes, Bytes]:
    """A state as bytes: its skeleton, and its tensors' bytes (n,), copied.

    It is of dicts, lists, tuples, numbers, text, None and dense tensors; else CheckpointError.
    """
    tensors: list[Tensor] = []
    try:
        skeleton = json.dumps(_bone(state, tensors, 0), separators=(",", ":")).encode()
    except ValueError as error:
        raise CheckpointError(f"a state that can't be text: {error}") from None
    data = np.empty(sum(one.numel() * one.element_size() for one in tensors), np.uint8)
    at = 0
    for one in tensors:
        size = one.numel() * one.element_size()
        if size:
            whole = one.detach().cpu().contiguous()
            # Of one element, any stride counts as contiguous.
            flat = whole.as_strided((one.numel(),), (1,)).view(torch.uint8)
            data[at : at + size] = flat.numpy()
        at += size
    return skeleton, data


def unpacked(skeleton: bytes, data: Bytes, *, copies: bool = False) -> Any:
    """The state that :func:`packed` made; CheckpointError if skeleton and bytes are not of one.

    Its tensors are views of ``data``; with ``copies`` none is, so that ``data`` may go.
    """
    try:
        bones = json.loads(skeleton)
        reader = _Reader(data, copies=copies)
        state = reader.read(bones, 0)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"no state: {error}") from None
    if reader.at != len(data):
        raise CheckpointError(f"a state of {reader.at} bytes, and {len(data)} came")
    return state


def _bone(value: Any, tensors: list[Tensor], depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise CheckpointError(f"a state of more than {MOST_DEPTH} levels")
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES or value.layout != torch.strided:
            raise CheckpointError(f"a tensor of {value.dtype}, {value.layout}, in a state")
        tensors.append(value)
        return ["x", name, list(value.shape)]
    if value is None or isinstance(value, bool | int | float | str):
        return ["v", value]
    if isinstance(value, Mapping):
        pairs = [[_bone(k, [], depth), _bone(v, tensors, depth + 1)] for k, v in value.items()]
        return ["d", pairs]
    if isinstance(value, tuple | list):
        kind = "t" if isinstance(value, tuple) else "l"
        return [kind, [_bone(one, tensors, depth + 1) for one in value]]
    raise CheckpointError(f"a {type(value).__name__} in a state: wanted tensors, numbers and text")


class _Reader:
    """Reads bones; ``at``: the bytes that its tensors have taken."""

    def __init__(self, data: Bytes, *, copies: bool) -> None:
        self._data = data
        self._copies = copies
        self.at = 0

    def read(self, bone: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise ValueError("too many levels")
        kind, *rest = bone
        if kind == "x":
            return self._tensor(*rest)
        (value,) = rest
        if kind == "v":
            if value is not None and not isinstance(value, bool | int | float | str):
                raise ValueError(f"{value!r} is no value")
            return value
        if kind == "d":
            return {self.read(k, depth + 1): self.read(v, depth + 1) for k, v in value}
        if kind in ("l", "t"):
            items = [self.read(one, depth + 1) for one in value]
            return tuple(items) if kind == "t" else items
        raise ValueError(f"{kind!r} is no kind")

    def _tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        dtype = DTYPES[name]
        if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError(f"{shape!r} is no shape")
        size = math.prod(shape) * dtype.itemsize
        piece = self._data[self.at : self.at + size]
        if len(piece) != size:
            raise ValueError(f"a tensor of {size} bytes, and {len(piece)} are left")
        self.at += size
        if not size:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        is_fit = piece.ctypes.data % dtype.itemsize == 0 and not self._copies
        aligned = piece if is_fit else piece.copy()
        return torch.from_numpy(aligned).view(dtype).reshape(tuple(shape))


MOST_BYTES: Final = 1 << 40
FAILED: Final = -1


def byte_tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.array(bytearray(text), np.uint8))


def state_from(
    source: int, state: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> tuple[bytes, Bytes]:
    """The state of rank ``source`` for all ranks of a group, reliably. All of them call this.

    ``state`` is called at ``source`` alone; the result is for ``unpacked``. A state that can't
    travel raises CheckpointError on all ranks.
    """
    skeleton, data, failure = b"", torch.empty(0, dtype=torch.uint8, device="cpu"), ""
    if dist.get_rank(group) == source:
        try:
            skeleton, array = packed(state())
            data = torch.from_numpy(array)
        except Exception as error:  # of a user's class, whatever it is: all ranks hear of it
            failure = f"{type(error).__name__}: {error}"
    with reliable():
        sizes = torch.tensor([FAILED if failure else len(skeleton), data.numel()], device="cpu")
        dist.broadcast(sizes, group=group, group_src=source)
        text, length = sizes.tolist()
        if text == FAILED:
            raise CheckpointError(failure or f"rank {source} has a state that can't travel")
        if not (0 <= text < MOST_BYTES and 0 <= length < MOST_BYTES):
            raise CheckpointError(f"rank {source} has a state of {text} and {length} bytes")
        bones = _received(byte_tensor(skeleton), text, source, group)
        values = _received(data, length, source, group)
    return bones.numpy().tobytes(), values.numpy()


def _received(tensor: Tensor, length: int, source: int, group: dist.ProcessGroup | None) -> Tensor:
    if dist.get_rank(group) != source:
        tensor = torch.empty(length, dtype=torch.uint8, device="cpu")
    if length:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensor

"""Tensors as the engine takes them: contiguous, apart from each other, flat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lossycoll.devices.registry import factories
from lossycoll.runtime.engine.binding import DType

DTYPES: Final = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
}
"""Dtypes that the engine can add."""
COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
"""Dtypes that the engine adds as pairs of floats, like most of torch.distributed itself."""
LOSSY_DTYPES: Final = COMPLEX | DTYPES.keys()
"""Dtypes that may lose packets: a stale element or a mean of fewer still has a meaning."""
WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""Dtypes that are added in another type."""
ENCODED_DTYPES: Final = frozenset({torch.float32, torch.complex64})
"""Dtypes that packets may carry in another form (``wire``); complex64 is two float32. Those of
:data:`WIDER` may too, as what they widen to, where packets carry few bits."""

_NOTHING: Final = torch.zeros(8, device="cpu")

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})
"""Classes that wrap no other tensors."""


def address(tensor: Tensor) -> int:
    """Address of the elements; any valid one for an empty tensor, of which nothing is touched."""
    return tensor.data_ptr() if tensor.numel() else _NOTHING.data_ptr()


def has_memory(tensor: Tensor) -> bool:
    """False for a tensor that stands for others (a subclass's, or one within ``vmap``), or whose
    storage was freed. It may have an address all the same: that of its offset."""
    try:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # NotImplementedError, too: torch refuses to say
        return False


def is_plain(tensor: Tensor) -> bool:
    """True for a tensor with nothing to check: dense, contiguous, in host memory that it has."""
    try:  # as has_memory() does, without its call
        storage = tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return (
        storage != 0
        and tensor.is_cpu
        and "cpu" not in factories
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def waits_for_its_result(tensor: object) -> bool:
    """True for the result of a functional collective, which its first use waits for."""
    if type(tensor) in PLAIN:
        return False
    # Whoever has one has imported this; others needn't.
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def awaited(arguments: Any) -> Any:
    """Arguments of a call, with results of functional collectives that are there."""
    if isinstance(arguments, list | tuple):
        return [awaited(one) for one in arguments]
    if isinstance(arguments, Tensor) and waits_for_its_result(arguments):
        return arguments.trigger_wait()  # type: ignore[attr-defined]
    return arguments


def nbytes(tensor: Tensor) -> int:
    """The size of all elements in bytes."""
    return tensor.numel() * tensor.element_size()


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is the elements in order, or such a copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.resolve_neg().resolve_conj()


def as_real(tensor: Tensor) -> Tensor:
    """A contiguous complex tensor as the floats it consists of, in the same memory; shape (n,)."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def scaled(tensor: Tensor, factor: float | None) -> Tensor:
    """:func:`contiguous`; with a factor a copy, times that."""
    if factor is None:
        return contiguous(tensor)
    with torch.inference_mode():
        return contiguous(tensor.detach() * factor)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all elements, one tensor after another; shape (sum of numel,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def room(tensors: Sequence[Tensor], *, kept: bool) -> tuple[Tensor, Callable[[], None] | None]:
    """One tensor for what is to fill several.

    Where they lie in one memory one behind the other it is that memory. Else it is new.

    Returns the tensor, shape (sum of numel,), and what brings its elements to ``tensors``; None if
    they are there.
    """
    elements = sum(tensor.numel() for tensor in tensors)
    filled = [tensor for tensor in tensors if tensor.numel()] or tensors  # empty ones lie nowhere
    if _in_a_row(filled):
        return filled[0].detach().as_strided((elements,), (1,)), None
    rows = flat(tensors) if kept else tensors[0].new_empty(elements)
    return rows, lambda: spread(rows, tensors)


def _in_a_row(tensors: Sequence[Tensor]) -> bool:
    storage = tensors[0].untyped_storage().data_ptr()
    end = address(tensors[0])
    for tensor in tensors:
        # Two memories may touch by chance, but then they are not one tensor's.
        if tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return False
        if contiguous(tensor) is not tensor:
            return False
        end += tensor.nbytes
    return True


def apart(source: Tensor, target: Tensor, own: int | None = None) -> Tensor:
    """``source``, or a copy of it where filling ``target`` would change what has yet to be read.

    ``own``: bytes from source to target at which an overlap is harmless, since each element is then
    read before it is replaced.
    """
    begin, other = source.data_ptr(), target.data_ptr()
    if begin + source.nbytes <= other or other + target.nbytes <= begin:
        return source
    return source if own is not None and other - begin == own else source.detach().clone()


def overlaps_itself(tensor: Tensor) -> bool:
    """True if several elements share memory (an expanded tensor): then it can't be filled."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def copy_back(buffer: Tensor, target: Tensor) -> Callable[[], None] | None:
    """A function that copies ``buffer`` to the caller's tensor; None if it is the same."""
    if buffer is target:
        return None
    return lambda: spread(buffer, [target])


def spread(buffer: Tensor, targets: Sequence[Tensor]) -> None:
    """The reverse of :func:`flat`: ``buffer``'s elements to ``targets``, in order."""
    # Nothing here is autograd's, and only in this mode can a thread of ours fill a tensor that the
    # caller made in it.
    with torch.inference_mode():
        elements, begin = buffer.reshape(-1), 0
        for target in targets:
            piece = elements[begin : begin + target.numel()]
            target.detach().copy_(piece.view(target.shape))
            begin += target.numel()

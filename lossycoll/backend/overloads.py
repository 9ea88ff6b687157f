"""Wrappers of what torch calls: short forms of arguments, calls that are another backend's or that
wait for a tensor first, and no tracing by torch.compile.

torch overloads the methods of its ProcessGroup in C++, and calls both forms itself: DDP's Join
reduces a map of used parameters by ``allreduce(tensor)``. Here a short form, a tensor in place of a
list or values in place of options, becomes the long one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from .checks import Delegated, Unawaited
from .tensors import awaited

c10d: Any = _distributed_c10d  # its stub lacks half of what is used here

FIELDS: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""Fields of torch's options, by the names of the values that stand for them in a short form."""


class Method(NamedTuple):
    """The arguments of a method: in the long form options are the last one."""

    options: type | None = None  # Their class; None: the method has none, and so one form
    values: Sequence[str] = ()  # What follows the others in the short form, in place of options
    # torch's names of the others, the long form's first
    first: Sequence[Sequence[str]] = ()
    # Place of the argument that is a tensor in the short form alone; None: there is none
    single: int | None = None
    also: str = ""  # Another name of the method, in older versions or in C++


_IN_PLACE: Final = (("tensors", "tensor"),)
_GATHERED: Final = (("output_tensors",), ("input_tensors", "input_tensor"))
_SCATTERED: Final = (("output_tensors", "output_tensor", "output"), ("input_tensors", "input"))
_SINGLE: Final = (("output", "outputTensor"), ("input", "inputTensor"))
_LISTS: Final = (
    ("outputs", "output_tensors", "output_lists"),
    ("inputs", "input_tensors", "input_list"),
)
_SPLIT: Final = (("output",), ("input",), ("output_split_sizes",), ("input_split_sizes",))
_Gather, _Reduce = c10d.AllgatherOptions, c10d.ReduceScatterOptions

METHODS: Final[Mapping[str, Method]] = {
    "allreduce": Method(c10d.AllreduceOptions, ("op", "timeout"), _IN_PLACE, 0),
    "allreduce_coalesced": Method(c10d.AllreduceCoalescedOptions, (), _IN_PLACE),
    "reduce": Method(c10d.ReduceOptions, ("root", "op", "timeout"), _IN_PLACE, 0),
    "reduce_scatter": Method(_Reduce, ("op", "timeout"), _SCATTERED, 0),
    "reduce_scatter_single": Method(_Reduce, (), _SINGLE, also="_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": Method(
        _Reduce, (), _LISTS, also="reduce_scatter_tensor_coalesced"
    ),
    "broadcast": Method(c10d.BroadcastOptions, ("root", "timeout"), _IN_PLACE, 0),
    "allgather": Method(_Gather, ("timeout",), _GATHERED, 1),
    "allgather_coalesced": Method(_Gather, (), _LISTS),
    "all_gather_single": Method(_Gather, (), _SINGLE, also="_allgather_base"),
    "all_gather_single_coalesced": Method(
        _Gather, (), _LISTS, also="allgather_into_tensor_coalesced"
    ),
    "gather": Method(c10d.GatherOptions, ("root", "timeout"), _GATHERED, 1),
    "scatter": Method(c10d.ScatterOptions, ("root", "timeout"), _SCATTERED, 0),
    "alltoall": Method(c10d.AllToAllOptions, (), _LISTS),
    "all_to_all_single": Method(c10d.AllToAllOptions, ("timeout",), _SPLIT, also="alltoall_base"),
    "send": Method(),
    "recv": Method(),
    "recv_anysource": Method(also="recvAnysource"),
    "barrier": Method(c10d.BarrierOptions, ("timeout",)),
}
"""A process group's methods that get tensors, and the barrier."""


def serve(kind: type) -> None:
    """Has methods take both forms, hand on what is another backend's, and wait for tensors."""
    for name, forms in METHODS.items():
        served = _served(getattr(kind, name), forms)
        setattr(kind, name, served)
        if forms.also:
            setattr(kind, forms.also, served)


def _served(method: Callable[..., Any], forms: Method) -> Callable[..., Any]:
    name, also, place, options = method.__name__, forms.also, len(forms.first), forms.options

    @functools.wraps(method)
    def served(group: Any, *given: Any, **named: Any) -> Any:
        # Nearly every call has the long form.
        if options is not None and not (len(given) > place and type(given[place]) is options):
            given, named = tuple(long_form(name, forms, given, named)), {}
        try:
            return method(group, *given, **named)
        except Unawaited:
            call = None
        except Delegated as found:
            call = getattr(found.backend, also, None) or getattr(found.backend, name, None)
            if call is None:
                raise
        if call is None:
            again = {key: awaited(value) for key, value in named.items()}
            return served(group, *awaited(given), **again)
        return group._coalescing.add(call(*given, **named))

    return served


def long_form(
    name: str, forms: Method, given: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    assert forms.options is not None
    places, names = list(given), dict(named)
    first = [_taken(name, aliases, places, names) for aliases in forms.first]
    single = forms.single is not None and isinstance(first[forms.single], Tensor)
    options = None
    given_here = forms.options if forms.values else forms.options | None
    if "opts" in names or (places and isinstance(places[0], given_here)):
        options = _taken(name, ("opts",), places, names)
    if options is None:
        options = forms.options()
        for value in forms.values:
            if value == "root" or places or value in names:
                found = _taken(name, (value,), places, names)
                if found is not None:
                    setattr(options, FIELDS[value], found)
    if places and not forms.values:
        wanted, got = forms.options.__name__, type(places[0]).__name__
        raise TypeError(f"{name}() got options of type {got}, wanted {wanted}")
    if places or names:
        raise TypeError(f"{name}() got {len(places) + len(names)} arguments more than it takes")
    return [[one] for one in first] + [options] if single else [*first, options]


def _taken(name: str, aliases: Sequence[str], places: list[Any], names: dict[str, Any]) -> Any:
    """The next argument of a call, which is taken out of the two."""
    if places:
        return places.pop(0)
    for alias in aliases:
        if alias in names:
            return names.pop(alias)
    raise TypeError(f"{name}() misses its argument {aliases[0]!r}")


T = TypeVar("T", bound=type)


def opaque(cls: T) -> T:
    """A class decorator: torch.compile runs its methods, and all that they call, as they are.

    While a compiled model runs, torch looks at every Python frame, and so at ours: DDP's reducer
    (C++) calls them in the middle of a forward. Tracing into them would fail at the first
    attribute. ``torch.compiler.disable`` does the same, but takes seconds to import the compiler
    and puts a wrapper around each call.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(member.__code__, strategy)
    return cls

"""Route of a call, and how packets carry its floats.

Nothing that may rightly differ between ranks decides it: all of them must take the same.
"""

from __future__ import annotations

import sys
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch

from lossycoll.options.fields import Options
from lossycoll.options.scopes import Scope, within
from lossycoll.plan import codec

from .description import CollectiveKind, Description, Loss, Rounding
from .reduction import Reduction
from .tensors import ENCODED_DTYPES, LOSSY_DTYPES, WIDER

OWN_FILES: Final = str(Path(__file__).parents[1])
OPERATORS: Final = torch._ops.__file__
FORWARD: Final = torch.nn.Module._call_impl.__code__
BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__
"""Code of the frames by which the two passes are recognized."""


class Route(Enum):
    """Route of a call: how it is served."""

    LOSSY = auto()
    """Engine, where packets may be lost."""
    RELIABLE = auto()
    """Engine, without loss."""
    GATHERED = auto()
    """The engine gathers contributions, and ranks reduce them: what the engine can't add."""


class ChosenRoute(NamedTuple):
    """The route of a call, the options it is served with, and how packets carry its floats."""

    route: Route
    options: Options
    encoding: str = "same"


@lru_cache(maxsize=64)
def reliable_version(options: Options) -> Options:
    """The same options with nothing given up."""
    return within(options, Scope((("delivery", "reliable"),), lossy_copies=False))


@lru_cache(maxsize=64)
def determined(options: Options) -> Options:
    """The same options with sums in the order of ranks."""
    return within(options, Scope((("deterministic", 1),), lossy_copies=False))


def choose(
    call: Description,
    reduction: Reduction | None,
    options: Options,
    around: Scope | None,
) -> ChosenRoute:
    """The route that a call takes, by the first that holds:

    1. lossy, if delivery is ``"lossy"``, the engine can form the reduction (its dtype and
       operation), and the kind of call, its size and the scope around it admit losses;
    2. gathered, if it reduces in a way that the engine can't form;
    3. reliable.

    From here on the options that are returned say so: their delivery is the call's.
    """
    kind, native = call.kind, reduction is None or reduction.native
    lossy_scope = around is not None and around.lossy_copies
    encoding = _encoding(call, options, around)
    if native and options.delivery == "lossy" and _may_lose(kind, call, options, lossy_scope):
        return ChosenRoute(Route.LOSSY, options, encoding)
    exact = reliable_version(options)
    if reduction is not None and not (native and kind.submit):
        return ChosenRoute(Route.GATHERED, exact, codec.phases(encoding)[0])
    return ChosenRoute(Route.RELIABLE, exact, encoding)


def adds_activations() -> bool:
    """True if the present call adds activations up, by where it comes from.

    An operator of ``torch.ops`` is a functional collective, which DTensor calls. Sums in a module's
    forward are activations as well, those in a backward pass within it are not: DDP's, FSDP's and
    their hooks'. Code that was compiled to C++ as a whole can't be told from its caller.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == OPERATORS:
        return True
    while frame is not None and frame.f_code is not BACKWARD:
        if frame.f_code is FORWARD:
            return True
        frame = frame.f_back
    return False


def _encoding(call: Description, options: Options, around: Scope | None) -> str:
    """Encoding of the call's floats in packets."""
    when = call.kind.rounding
    if when is Rounding.CALL:
        return call.encoding
    if options.wire == "same" or when is Rounding.NEVER:
        return "same"
    if when is Rounding.SCOPE and (around is None or not around.sets("wire")):
        return "same"
    few_bits = options.wire in codec.FEW_BITS
    if call.dtype not in ENCODED_DTYPES and not (few_bits and call.dtype in WIDER):
        return "same"
    # Where ranks don't know each other's sizes, sizes can't decide.
    large = call.splits is not None or call.nbytes >= options.lossy_min_bytes
    if not large:
        return "same"
    # What is only copied is like the means that an all-reduce gathers.
    return options.encoding if call.op is not None else codec.phases(options.encoding)[1]


def _may_lose(kind: CollectiveKind, call: Description, options: Options, lossy_scope: bool) -> bool:
    """True if lossy delivery is meant for this call."""
    loss = kind.loss
    if loss is Loss.REDUCTION:
        return call.nbytes >= options.lossy_min_bytes
    if loss is Loss.COPY:
        floats = lossy_scope and call.writes[0].dtype in LOSSY_DTYPES
        return floats and call.nbytes >= options.lossy_min_bytes
    return loss is Loss.DELIVERY

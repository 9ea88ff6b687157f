"""Replacement of torch's gloo by lossy, for frameworks that ask for gloo by name.

With ``LOSSYCOLL_REPLACE=gloo`` the hook that registers the backend calls :func:`start`. Every
group that is made afterwards on CPU or CUDA, and would be gloo's, is lossy's. What torch makes of
gloo otherwise is refused by name: it would lose what the user asked for without a word.

No torch at the top: importing it runs the hook, which imports this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Final

from lossycoll.errors import UnsupportedError

REPLACED: Final = "gloo"
BY: Final = "lossy"
DEVICES: Final = ("cpu", "cuda")
REMEDY: Final = "unset LOSSYCOLL_REPLACE, or call lossycoll.stop_replacing() before"

log: Final = logging.getLogger("lossycoll")
_undo: Final[list[Callable[[], None]]] = []


def start() -> None:
    """Groups of gloo are lossy's from now on."""
    if _undo:
        return
    from torch import distributed

    dist: Any = distributed
    c10d = dist.distributed_c10d
    made, theirs = c10d._new_process_group_helper, getattr(dist, "ProcessGroupGloo", None)
    signature = inspect.signature(made)
    told: list[str] = []

    @functools.wraps(made)
    def make(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named)
        asked = str(call.arguments["backend"])
        wanted = replaced(asked)
        if wanted == asked:
            return made(*args, **named)
        if any(isinstance(one, getattr(theirs, "_Options", ())) for one in call.arguments.values()):
            raise UnsupportedError(
                f"ProcessGroupGloo._Options are options of gloo, and lossy replaces it here: pass "
                f"lossycoll.Options, or {REMEDY}"
            )
        call.arguments["backend"] = c10d.Backend(wanted)
        found = made(*call.args, **call.kwargs)
        if not told:  # once, and not before the group has set up the log
            told.append(asked)
            log.info(
                "event=replaces asked=%s made=%s undo=lossycoll.stop_replacing()", asked, wanted
            )
        return found

    c10d._new_process_group_helper = make
    _undo.append(lambda: setattr(c10d, "_new_process_group_helper", made))
    if theirs is not None:
        dist.ProcessGroupGloo = _refusing(theirs)
        _undo.append(lambda: setattr(dist, "ProcessGroupGloo", theirs))


def stop_replacing() -> None:
    """Undo ``LOSSYCOLL_REPLACE``: groups of gloo that are made from now on are gloo's own.

    Existing groups stay as they are. Call it on all ranks, between the same groups. If nothing is
    replaced, it does nothing.
    """
    while _undo:
        _undo.pop()()


def replaced(backend: str) -> str:
    """The backend that a group is made with. ``backend``: what torch was asked for, such as
    ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    if backend == "undefined":
        import torch

        device = torch._C._get_accelerator().type
        if torch.distributed.Backend.default_device_backend_map.get(device) != REPLACED:
            return backend
        backend = REPLACED if device in DEVICES else f"{device}:{REPLACED}"
    if ":" not in backend:
        return BY if backend.lower() == REPLACED else backend
    parts = []
    for part in backend.lower().split(","):
        device, _, name = part.partition(":")
        if name == REPLACED and device not in DEVICES:
            raise UnsupportedError(
                f"backend {backend!r} asks for gloo on {device}, and lossy, which replaces it, "
                f"serves {' and '.join(DEVICES)}: {REMEDY}"
            )
        parts.append(f"{device}:{BY}" if name == REPLACED else part)
    return BY if {part.partition(":")[2] for part in parts} == {BY} else ",".join(parts)


def _refusing(theirs: type) -> type:
    """A class like gloo's, that makes no group but says why."""

    def refuse(self: Any, *args: Any, **named: Any) -> None:
        del self, args, named
        raise UnsupportedError(
            f"ProcessGroupGloo(...) makes gloo's group without torch.distributed.new_group, where "
            f"lossy could replace it; torch.distributed.rpc does so as well: {REMEDY}"
        )

    return type(theirs.__name__, (theirs,), {"__init__": refuse, "__module__": theirs.__module__})

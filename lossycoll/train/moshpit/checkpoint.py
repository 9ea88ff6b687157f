"""A training's state, as peers exchange it, and in a file that is whole, or as it was before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lossycoll.errors import CheckpointError, OptionError
from lossycoll.train.common.models import is_dtensor, like, local

COMPILED: Final = "_orig_mod."  # in names of what ``torch.compile`` has wrapped
OF_SCHEDULES: Final = ("lr", "initial_lr")
"""Settings of an optimizer that each peer's own scheduler has."""
MOST_NAMED: Final = 3


def _names(model: nn.Module) -> dict[str, str]:
    """Plain names of what travels, and the model's own. Frozen parameters don't travel."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, one in named if not one.requires_grad}
    return {name.replace(COMPILED, ""): name for name in model.state_dict() if name not in frozen}


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and buffers by plain names, if some are shards; else none.

    To be asked for before the first forward pass: during one, ``fully_shard`` has whole parameters
    in the model, which ``state_dict()`` would take away.
    """
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if not any(map(is_dtensor, own.values())):
        return {}
    own.update(model.named_buffers(remove_duplicate=False))
    return {plain: own[name] for plain, name in _names(model).items()}


def model_state(model: nn.Module, shards: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Trained parameters and buffers by plain names, as views of the model's; with ``shards``,
    :func:`shards_of` the model, this rank's parts."""
    if shards:
        return {plain: local(one) for plain, one in shards.items()}
    state = model.state_dict()
    return {plain: state[name] for plain, name in _names(model).items()}


def load_model(
    model: nn.Module, state: Mapping[str, Any], shards: Mapping[str, Tensor] | None = None
) -> None:
    """Takes what :func:`model_state` returned, compiled or not. OptionError: it has other names.
    RuntimeError: it has other shapes."""
    names = {} if shards else _names(model)
    if differ := sorted((shards or names).keys() ^ state.keys()):
        raise OptionError(
            f"the state and the model differ in {len(differ)} names, "
            f"{', '.join(differ[:MOST_NAMED])} among them"
        )
    if shards:
        for plain, one in shards.items():
            if local(one).shape != state[plain].shape:
                raise RuntimeError(f"{plain} has shape {tuple(state[plain].shape)}")
            local(one).copy_(state[plain])
        return
    model.load_state_dict({names[plain]: value for plain, value in state.items()}, strict=False)


def check_finite(state: object) -> None:
    """Raise CheckpointError if values of :func:`model_state` aren't finite: as the newest, the
    state would become that of all peers."""
    for name, one in state.items() if isinstance(state, Mapping) else ():
        is_float = isinstance(one, Tensor) and one.is_floating_point()
        if is_float and not bool(one.isfinite().all()):
            raise CheckpointError(
                f"values of {name} aren't finite; take an earlier checkpoint, or another peer's "
                f"state by catch_up()"
            )


def memory_of(state: Mapping[str, Any], peer: str) -> dict[int, Tensor]:
    """What rounding has taken from the peer's values, as its checkpoint has it; of another peer's
    nothing. CheckpointError: it is malformed."""
    memory = state.get("memory", {})
    kept = memory.get("parts") if isinstance(memory, Mapping) else None
    if isinstance(memory, Mapping) and memory.get("of") != peer:
        return {}
    if not isinstance(kept, Mapping) or not all(
        type(part) is int and isinstance(one, Tensor) and one.is_floating_point()
        for part, one in kept.items()
    ):
        raise CheckpointError("its memory of rounding is malformed")
    return dict(kept)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Takes an optimizer's state. Settings that only one of the two has stay as they are here, as
    other versions of torch have others; so do learning rates, which are schedulers'. OptionError:
    it is of other parameters."""
    groups = optimizer.state_dict()["param_groups"]
    theirs = state["param_groups"]
    sizes = [[len(group["params"]) for group in some] for some in (groups, theirs)]
    if sizes[0] != sizes[1]:
        raise OptionError(f"its groups have {sizes[1]} parameters, wanted {sizes[0]}")
    for own, other in zip(groups, theirs, strict=True):
        known = own.keys() & other.keys() - {"params", *OF_SCHEDULES}
        own.update({name: other[name] for name in known})
        # State is by the number of a parameter.
        own["params"] = list(other["params"])
    owns = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    kept = dict(state["state"])
    for number, own in zip(numbers, owns, strict=True):
        if is_dtensor(own) and number in kept:
            kept[number] = {
                name: like(own, one) if _is_part(own, one) else one
                for name, one in kept[number].items()
            }
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def _is_part(parameter: Tensor, value: object) -> bool:
    is_plain = isinstance(value, Tensor) and not is_dtensor(value)
    return is_plain and value.shape == local(parameter).shape  # type: ignore[attr-defined]


PathLike: TypeAlias = str | os.PathLike[str]
PART: Final = ".part"  # suffix of a file that isn't whole yet
YOUNG_SECONDS: Final = 60.0
"""For which a part stays that nobody seems to hold: its writer may be on another machine, of whose
locks some file systems know nothing."""


def write(path: PathLike, state: Any) -> int:
    """Writes a state beside the file, and puts it in its place when all of it is on the disk. The
    state is what ``torch.load(weights_only=True)`` can read. Returns the file's bytes.
    CheckpointError: it can't be written (the disk is full, say); what was there is as it was."""
    wanted = _target(path)
    remove_stale(wanted)
    part = _new_part(wanted)
    try:
        with part.open("xb") as file:
            # Until it is closed, or its process ends. Not every file system knows that.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)  # remove_stale() has it shortly
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.replace(wanted)
    except BaseException as error:
        free = _free(wanted.parent)
        with contextlib.suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError | RuntimeError):  # torch's writer has one of its own
            raise
        raise CheckpointError(
            f"checkpoint {wanted}: {_why(error)}; {free}; what was there before is as it was"
        ) from error
    with contextlib.suppress(OSError):  # it is whole, and there; its name is when its folder is
        folder = os.open(wanted.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return size


def _target(path: PathLike) -> Path:
    """What a link leads to, not the link."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a null byte
        raise CheckpointError(f"checkpoint {os.fspath(path)}: {error}") from error


def _new_part(wanted: Path) -> Path:
    """Other peers may write there, from this process or with the same number on another machine."""
    return wanted.with_name(f"{wanted.name}{PART}-{secrets.token_hex(8)}")


def remove_stale(path: PathLike) -> None:
    """Removes what writers of the file have left that were killed. Those that live hold theirs."""
    wanted = _target(path)
    is_part = re.compile(re.escape(f"{wanted.name}{PART}-") + "[0-9a-f]{16}").fullmatch
    with contextlib.suppress(OSError):
        left = [one for one in wanted.parent.iterdir() if is_part(one.name)]
        now = _changed_now(wanted) if left else 0.0
        for one in left:
            with contextlib.suppress(OSError), one.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if now - os.fstat(file.fileno()).st_mtime > YOUNG_SECONDS:
                    one.unlink()


def _changed_now(wanted: Path) -> float:
    """When a file is changed now, by the clock of the file system. OSError: none can be."""
    probe = _new_part(wanted)
    try:
        with probe.open("xb") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def read(path: PathLike, take: Callable[[Any], None]) -> None:
    """Gives ``take`` what :func:`write` wrote. No code that a file may have is run.
    CheckpointError: the file isn't there, isn't whole, or isn't one that ``take`` can use."""
    name = f"checkpoint {os.fspath(path)}"
    remove_stale(path)
    try:
        with Path(path).open("rb") as file:
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # whatever the file may be
                said = str(error).partition("\n")[0] or type(error).__name__
                raise CheckpointError(f"{name}: it isn't one, or not all of it: {said}") from error
    except OSError as error:
        raise CheckpointError(f"{name}: {error.strerror}") from error
    try:
        take(state)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free in {folder}"
    except OSError:
        return f"there is no folder {folder}"


def _why(error: BaseException) -> str:
    """Reason as the system said it, rather than what torch's writer made of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).partition("\n")[0] or type(error).__name__

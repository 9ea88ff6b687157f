"""Registers ``backend="lossy"`` while torch itself is being imported (entry point torch.backends).

It runs in every process that imports torch, data loader workers included, and a failure here would
break ``import torch``: so nothing is imported at the top, nothing is started, nothing may raise.
"""

from __future__ import annotations

from typing import Any


def load() -> Any:
    """Imports the backend's module, while Python's garbage collector pauses.

    What the import makes stays, but would have the collector walk all that torch has made: that
    took longer than the import itself.
    """
    import gc

    collects = gc.isenabled()
    gc.disable()
    try:
        from .backend import process_group
    finally:
        if collects:
            gc.enable()
    return process_group


def _create(backend_options: Any, pg_options: object) -> Any:
    return load().LossyProcessGroup(backend_options, pg_options)


def register() -> None:
    """Entry point of torch's import: makes the name known, and replaces gloo if it is to."""
    make_known()
    _replace()


def make_known() -> None:
    """Makes the name known to torch.distributed; the backend is imported when a group is made."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "LOSSY" not in dist.Backend._plugins:
            dist.Backend.register_backend(
                "lossy", _create, extended_api=True, devices=["cpu", "cuda"]
            )
    except Exception as error:
        _warn(f"lossycoll: the backend is not registered: {error!r}")


def _replace() -> None:
    """Has lossy serve where gloo is asked for, if the option ``replace`` says so."""
    import os

    wanted = os.environ.get("LOSSYCOLL_REPLACE", "")
    if not wanted:
        return
    try:
        if wanted != "gloo":
            raise ValueError(f"{wanted!r}, wanted gloo, or nothing")
        from .backend.replacement import start

        start()
    except Exception as error:
        _warn(f"lossycoll: LOSSYCOLL_REPLACE replaces nothing: {error}")


def _warn(text: str) -> None:
    import contextlib
    import sys
    import warnings

    try:
        warnings.warn(text, stacklevel=4)
    except Exception:  # warnings are errors here (-W error), which torch's import wouldn't survive
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr)

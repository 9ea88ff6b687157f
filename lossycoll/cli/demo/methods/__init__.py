"""The training methods that the demo and the study of quality compare.

To add a method, write one module like :mod:`.sharded` and register it once:

- ``wrap(model, optimizer_class, settings)`` returns what is run forward and what is stepped.
- ``attach(forward, optimizer)``, if needed, adds what hooks into both, such as DriftBound.
- ``register(Method(name=..., module=__name__, wrap=wrap, summary=..., colour=...))``.

In this package, add it to ``BUILT_IN`` below instead of registering it. From your own package,
import your module before you start the demo (``lossycoll.cli.main.main``) or the study. The demo's
``--runs``, table, notes and plot, and the study's runs, tables and plots then include the method.
Ranks are processes of their own that import ``module``: it has to be on ``PYTHONPATH``.
tests/cli/demo/sign_sgd.py is a complete example.
"""

from __future__ import annotations

from typing import Final

from .ddp import DDP, DRIFT_BOUND
from .registry import Method, Prepared, find, methods, register
from .sharded import SHARDED

__all__ = [
    "BUILT_IN",
    "DDP",
    "DRIFT_BOUND",
    "SHARDED",
    "Method",
    "Prepared",
    "find",
    "methods",
    "register",
]

BUILT_IN: Final = (DDP, DRIFT_BOUND, SHARDED)

for _method in BUILT_IN:
    register(_method)

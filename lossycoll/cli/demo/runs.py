"""The demo's runs: two that lose nothing, and one of each registered method under loss."""

from __future__ import annotations

from dataclasses import dataclass

from .methods import DDP, Method, methods
from .methods.registry import DEMO_RUNS


@dataclass(frozen=True)
class DemoRun:
    """One training run. ``lossy``: packets are dropped. ``width``: of its line in the plot."""

    name: str
    backend: str
    method: Method
    lossy: bool
    colour: str
    width: float


def runs() -> dict[str, DemoRun]:
    """All runs by name, in the order in which they are done and shown."""
    # Curves lie on top of one another: the first is drawn wide, the others within it.
    gloo, lossless = DEMO_RUNS
    clean = (
        DemoRun(gloo, "gloo", DDP, lossy=False, colour="tab:blue", width=6.0),
        DemoRun(lossless, "lossy", DDP, lossy=False, colour="tab:green", width=3.0),
    )
    under_loss = (
        DemoRun(one.run_name, "lossy", one, lossy=True, colour=one.colour, width=1.4)
        for one in methods()
    )
    return {run.name: run for run in (*clean, *under_loss)}

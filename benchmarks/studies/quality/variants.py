"""The variants: what a training script does against loss, from nothing to all.

They are the registered training methods (lossycoll.cli.demo.methods), and changes of them that only
this study tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn

import lossycoll
from lossycoll.cli.demo.methods import (
    DDP,
    DRIFT_BOUND,
    SHARDED,
    Method,
    attach_drift_bound,
    methods,
    wrap_ddp,
    wrap_sharded,
)

from .matrix import BASE, CONTROL, DIALS, DISPERSED, SPREAD_DIALS, UNREPAIRED, dial


def _dispersed(
    model: nn.Module, optimizer_class: Any, settings: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    wrapped = wrap_ddp(model, optimizer_class, settings)
    return _hooked(*wrapped, None, lossycoll.dispersing_hook)


def _hooked(forward: Any, optimizer: Any, state: Any, hook: Any) -> tuple[nn.Module, Any]:
    forward.register_comm_hook(state, hook)
    return forward, optimizer


def _sharded(name: str, **how: Any) -> Method:
    return replace(SHARDED, name=name, wrap=partial(wrap_sharded, **how))


def _feedback(
    model: nn.Module, optimizer_class: Any, settings: Mapping[str, Any], **how: Any
) -> tuple[nn.Module, Any]:
    wrapped = wrap_ddp(model, optimizer_class, settings)
    return _hooked(*wrapped, lossycoll.WireFeedbackState(**how), lossycoll.wire_feedback_hook)


def _wires() -> tuple[Method, ...]:
    """DriftBound, whose gradients travel in few bits, and ShardedOptimizer, whose parameters do
    too."""
    spikes = {"wire_group": 32, "wire_spikes": 1}
    options: dict[str, dict[str, Any]] = {
        "wire/bf16": {"wire": "bf16"},
        "wire/int8": {"wire": "int8"},
        "wire/int4": {"wire": "int4"},
        "wire/int4/stochastic": {"wire": "int4", "wire_rounding": "stochastic"},
        "wire/int2/spikes": {"wire": "int2", **spikes},
    }
    hooks: dict[str, dict[str, Any]] = {
        "wire/int4/feedback": {"wire": "int4/int8"},
        "wire/int2/spikes/feedback": {"wire": "int2/int8", **spikes},
    }
    udp = {"link": "udp"}  # within a host nothing is encoded
    found = [replace(DRIFT_BOUND, name=name, options=how | udp) for name, how in options.items()]
    for name, how in hooks.items():
        wrap = partial(_feedback, **how)
        found.append(replace(DRIFT_BOUND, name=name, options=udp, wrap=wrap))
    for name, how in (
        ("wire/sharded/int8", {"wire": "int8"}),
        ("wire/sharded/int4/feedback", {"wire": "int4/int8", "error_feedback": True}),
    ):
        found.append(replace(_sharded(name, **how), options=udp))
    return tuple(found)


def _dials() -> tuple[Method, ...]:
    """What says how much may be missing, in place of how often is sent again."""
    found = []
    for missing in DIALS:
        options: dict[str, Any] = {"max_missing": missing}
        for method in (DRIFT_BOUND, SHARDED):
            found.append(replace(method, name=dial(method.name, missing), options=options))
    for missing in SPREAD_DIALS:
        options = {"max_missing": missing, "repair": 0}
        name = dial(DRIFT_BOUND.name, missing, "norepair")
        found.append(replace(DRIFT_BOUND, name=name, options=options))
        # Nor are blocks asked for again that are stale.
        name = dial(SHARDED.name, missing, "norepair")
        found.append(replace(_sharded(name, **options), options=options))
    for missing in SPREAD_DIALS:
        name = dial(DRIFT_BOUND.name, missing, "norepair", "dispersed")
        options = {"max_missing": missing, "repair": 0}
        found.append(replace(DRIFT_BOUND, name=name, wrap=_dispersed, options=options))
    return tuple(found)


RELIABLE: Final = {"delivery": "reliable", "link": "udp"}
"""By the network, so that bytes compare with those of lossy calls, which faults send there."""

OWN: Final = (
    replace(DDP, name=BASE, options=RELIABLE),
    # What is lost counts as zero, in the sum of the gradients and in what is handed back.
    replace(
        DDP,
        name="zero-fill",
        options={"estimator": "zero_fill", "on_missing": "zero"},
        colour="tab:brown",
        marker="v",
    ),
    # Zero in the sum; where a sum doesn't come back, the rank's own gradient over N (which DDP has
    # put into the bucket) stays. The published code of OptiReduce (arXiv 2310.06993) does this.
    replace(
        DDP,
        name="own-gradient",
        options={"estimator": "zero_fill", "on_missing": "keep"},
        colour="tab:olive",
        marker="s",
    ),
    replace(DDP, name=CONTROL, options=RELIABLE, colour="tab:gray", marker="x"),
    replace(DRIFT_BOUND, name=UNREPAIRED, options={"repair": 0}, colour="tab:cyan", marker="^"),
    # What was tried to improve the two methods.
    _sharded("sharded/published", repair=0, max_age=None),
    _sharded("sharded/repair0", repair=0, max_age=3),
    _sharded("sharded/repair0/age1", repair=0, max_age=1),
    _sharded("sharded/repair0/age0", repair=0, max_age=0),
    _sharded("sharded/feedback", error_feedback=True, max_age=3),
    _sharded("sharded/repair1", repair=1, max_age=3),
    _sharded("sharded/age0", max_age=0),
    _sharded("sharded/age3", max_age=3),
    replace(
        DRIFT_BOUND,
        name="ddp+driftbound/repair0/period4",
        attach=partial(attach_drift_bound, period=4),
        options={"repair": 0},
    ),
    replace(DRIFT_BOUND, name=DISPERSED[0], wrap=_dispersed, options={"repair": 0}),
    replace(DRIFT_BOUND, name=DISPERSED[1], wrap=_dispersed),
    replace(DRIFT_BOUND, name="ddp+driftbound/repair1", options={"repair": 1}),
    *_dials(),
    *_wires(),
)
"""Those of this study alone."""


def variants() -> dict[str, Method]:
    """All variants by name."""
    for taken in {method.name for method in OWN} & {method.name for method in methods()}:
        raise ValueError(f"method {taken!r} has the name of a variant of the study: rename it")
    return {method.name: method for method in (*OWN, *methods())}

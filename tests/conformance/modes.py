"""The ways in which the suite is run: a backend and the options that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mode:
    """``env``: variables that the ranks get. ``meaning``: what the documentation says of it."""

    name: str
    backend: str
    meaning: str
    env: dict[str, str] = field(default_factory=dict)


_DELIVERY = "LOSSYCOLL_DELIVERY"
_INJECT = "LOSSYCOLL_INJECT"

MODES = {
    mode.name: mode
    for mode in (
        Mode("gloo", "gloo", "torch's own backend for CPUs, the yardstick"),
        Mode("reliable", "lossy", "`LOSSYCOLL_DELIVERY=reliable`", {_DELIVERY: "reliable"}),
        Mode("default", "lossy", "no options at all: large float sums may lose packets"),
        Mode(
            "reliable-loss",
            "lossy",
            "reliable delivery, while 5% of all data packets are lost",
            {_DELIVERY: "reliable", _INJECT: "loss=0.05,seed=7"},
        ),
        Mode(
            "default-loss",
            "lossy",
            "default delivery, while 1% of all data packets are lost",
            {_INJECT: "loss=0.01,seed=7"},
        ),
    )
}

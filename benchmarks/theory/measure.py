"""The theory's figures, measured part by part: experiments.py and ranks.py with many samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lossycoll.plan import Finish
from tests.support.harness import run_good

from . import experiments as theory
from . import formulas
from . import hosts as theory_hosts
from . import ranks as theory_ranks
from .anchors import rps
from .optireduce import best_effort
from .orders import orders
from .owners import owners
from .parity import parity
from .smaller import smaller
from .spread import spread
from .swarms import groups

UNEVEN = "loss=0.1,link=3-0:0.5,link=3-1:0.5,link=0-2:0.4"
CASES: dict[str, tuple[str, int | None, Finish | None]] = {
    "even 10%": ("loss=0.1", None, None),
    "even 30%": ("loss=0.3", None, None),
    "bursts of 4, 30%": ("loss=0.3,burst=4", None, None),
    "rank 1 dead, 30%": ("loss=0.3", 1, None),
    "rank 1 dead, bursts of 4, 30%": ("loss=0.3,burst=4", 1, None),
    "uneven, weighted": (UNEVEN, None, Finish.WEIGHTED),
    "uneven, weighted, bursts of 4": (f"{UNEVEN},burst=4", None, Finish.WEIGHTED),
    "uneven, by count": (UNEVEN, None, None),
}
LOSSES = (0.05, 0.1, 0.2, 0.3, 0.4)
WORLDS = (2, 4, 8)
BURSTS = (1.5, 2.0, 4.0, 8.0, 16.0)
STEPS = {"elements": 2400, "steps": 5000, "period": 16, "every": 47, "repairs": [0, 1, 2]}
OPTIMIZER_STEPS = 480
STATE_LOSS = 0.3
STATE_VARIANTS = ((0, 0, False), (16, 2, False))
VARIANTS = (
    (0, 0, False),
    (16, 0, False),
    (16, 2, False),
    (16, 2, True),
    (32, 2, True),
    (48, 2, True),
)


def unbiased() -> list[dict[str, Any]]:
    rows = []
    for case, (faults, dead, finish) in CASES.items():
        for algorithm in ("ring", "transpose", "reduce_scatter"):
            samples = theory.means(
                "sockets", algorithm, f"{faults},seed=41", 1500, dead=dead, finish=finish
            )
            true = theory.truth(4, dead)
            rows.append(
                {
                    "case": case,
                    "algorithm": algorithm,
                    "standard_errors": theory.standard_errors(samples, true),
                    "bias": float(np.abs(np.nanmean(samples, axis=(0, 2)) / true - 1).max()),
                }
            )
    return rows


def inflation() -> list[dict[str, Any]]:
    return [
        {
            "world": world,
            "loss": loss,
            "measured": theory.variance("sockets", world, loss, 400),
            "predicted": formulas.inflation(loss, world),
        }
        for world in WORLDS
        for loss in LOSSES
    ]


def stratified() -> list[dict[str, Any]]:
    return [
        {
            "world": world,
            "loss": loss,
            "measured": theory.variance("sockets", world, loss, 400, algorithm="reduce_scatter"),
            "predicted": formulas.stratified_variance(loss, world),
        }
        for world in WORLDS
        for loss in LOSSES
    ]


def estimators() -> list[dict[str, Any]]:
    rows = []
    for loss in LOSSES:
        for mean in (0.0, 1.0, 2.0):
            for name, finish, predicted in (
                ("count", None, formulas.inflation(loss, 4)),
                (
                    "inverse_probability",
                    Finish.WEIGHTED,
                    formulas.weighted_variance(loss, 4, mean),
                ),
            ):
                measured = theory.variance("sockets", 4, loss, 400, mean=mean, finish=finish)
                rows.append(
                    {
                        "loss": loss,
                        "mean": mean,
                        "estimator": name,
                        "measured": measured,
                        "predicted": predicted,
                    }
                )
    return rows


def broadcast() -> list[dict[str, Any]]:
    rows = []
    for mean in (0.0, 0.5):
        for loss in LOSSES:
            got = theory.broadcast("sockets", loss, 1500, mean=mean)
            older = got.ages[::-1].cumsum()[::-1] / got.ages.sum()
            rows.append(
                {
                    "loss": loss,
                    "mean": mean,
                    "drift": got.drift,
                    "predicted": formulas.broadcast_drift(loss, mean=mean),
                    "published": formulas.broadcast_drift_published(loss),
                    "from_owner": got.from_owner,
                    "from_owner_predicted": formulas.owner_distance(loss) if not mean else None,
                    "older": older[:9].tolist(),
                }
            )
    return rows


def bursts() -> list[dict[str, Any]]:
    return [
        {
            "loss": loss,
            "burst": burst,
            "drift": theory.bursts("sockets", loss, burst, 60),
            "predicted": formulas.burst_drift(loss, burst),
        }
        for loss in (0.1, 0.3)
        for burst in BURSTS
    ]


def steps() -> list[dict[str, Any]]:
    rows = []
    for loss in (0.1, 0.3):
        got = run_good(theory_ranks.steps, 3, theory_ranks.env(loss, **STEPS), timeout=590)[0]
        free, *bound = got["drifts"]
        per_step = formulas.free_drift_per_step(loss, 3)
        rows.append(
            {
                "loss": loss,
                "at": got["at"],
                "free": free,
                "per_step": free[-1] / got["at"][-1],
                "per_step_predicted": per_step,
                "bound": [
                    {
                        "repair": repair,
                        "drift": drifts,
                        "mean": sum(drifts[2:]) / len(drifts[2:]),
                        "predicted": formulas.bounded_drift(per_step, 16, 3, loss ** (1 + repair)),
                    }
                    for repair, drifts in zip(STEPS["repairs"], bound, strict=True)  # type: ignore[call-overload]
                ],
                "states": [
                    {
                        "state": state,
                        "halves": _halves(got["states"][state]),
                        "predicted": formulas.state_drift(loss, 3, state, beta),
                    }
                    for state, beta in theory_ranks.BETAS.items()
                ],
            }
        )
    return rows


def optimizers() -> list[dict[str, Any]]:
    rows = []
    for loss in (0.1, 0.3):
        env = theory_ranks.env(loss, variants=VARIANTS, steps=OPTIMIZER_STEPS) | {
            "LOSSYCOLL_MTU": "1500"
        }
        for row in run_good(theory_ranks.optimizers, 3, env, timeout=590)[0]:
            rows.append({"loss": loss, **row})
    return rows


def _halves(series: Sequence[float]) -> list[float]:
    """The means over the first half, without its first tenth, and over the second."""
    half = len(series) // 2
    return [float(np.mean(series[half // 10 : half])), float(np.mean(series[half:]))]


def momentum() -> list[dict[str, Any]]:
    return _states("SGD, momentum 0.9")


def adam() -> list[dict[str, Any]]:
    return _states("AdamW")


def _states(optimizer: str) -> list[dict[str, Any]]:
    """Without DriftBound, and with it."""
    env = theory_ranks.env(
        STATE_LOSS, optimizer=optimizer, variants=STATE_VARIANTS, steps=5000, every=STEPS["every"]
    )
    rows = run_good(theory_ranks.states, 3, env | {"LOSSYCOLL_MTU": "1500"}, timeout=590)[0]
    return [
        {"loss": STATE_LOSS, **row, "halves": {k: _halves(v) for k, v in row["drift"].items()}}
        for row in rows
    ]


def partial_sums() -> list[dict[str, Any]]:
    rows = []
    for shape, ranks in theory_hosts.SHAPES.items():
        for loss in (0.1, 0.3):
            for mean in (0.0, 1.0):
                stratified = [
                    n
                    * formulas.stratified_sums_variance(
                        loss, n, (*ranks[:i], *ranks[i + 1 :]), mean
                    )
                    for i, n in enumerate(ranks)
                ]
                rows.append(
                    {
                        "hosts": shape,
                        "loss": loss,
                        "mean": mean,
                        "all_reduce": theory_hosts.variance(ranks, loss, 400, mean=mean),
                        "all_reduce_predicted": formulas.inflation(loss, len(ranks)),
                        "reduce_scatter": theory_hosts.variance(
                            ranks, loss, 400, mean=mean, algorithm="reduce_scatter"
                        ),
                        "reduce_scatter_predicted": sum(stratified) / sum(ranks),
                    }
                )
    return rows


PARTS = {
    "unbiased": unbiased,
    "inflation": inflation,
    "stratified": stratified,
    "estimators": estimators,
    "broadcast": broadcast,
    "bursts": bursts,
    "steps": steps,
    "optimizers": optimizers,
    "momentum": momentum,
    "adam": adam,
    "partial sums": partial_sums,
    "parity": parity,
    "owners": owners,
    "spread": spread,
    "smaller": smaller,
    "rps": rps,
    "best effort": best_effort,
    "orders": orders,
    "groups": groups,
}

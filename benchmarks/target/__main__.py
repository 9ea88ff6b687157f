"""Time to a validation loss on bad networks: ``python -m benchmarks.target --report docs``.

The demo's model is trained in networks of the laboratory: by DDP over gloo, by DDP over this
backend with DriftBound and two rounds of resending, and by ShardedOptimizer. All see the same data.
The loss to reach is what the worst of them ends with. Needs the laboratory (``lossycoll lab
check``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from rich.console import Console

from benchmarks.lab_job import run_job
from benchmarks.quality.report import between, markdown
from benchmarks.quality.store import commit
from lossycoll.demo_train import TrainConfig
from lossycoll.errors import LossyError
from lossycoll.lab.laboratory import Lab

Curve = list[tuple[float, int, float]]
PROFILES = ("cross-dc", "home")
# Name: backend, method of the demo, environment.
METHODS: dict[str, tuple[str, str, dict[str, str]]] = {
    "gloo": ("gloo", "ddp", {}),
    "lossy, DriftBound": ("lossy", "bounded", {"LOSSYCOLL_REPAIR": "2"}),
    "lossy, ShardedOptimizer": ("lossy", "sharded", {}),
}
COLOURS = dict(zip(METHODS, ("tab:blue", "tab:orange", "tab:purple"), strict=True))
RUN_SECONDS = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.target", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=200)
    add("--width", type=int, default=128, help="of the model, two blocks deep")
    add("--batch", type=int, default=4, help="windows of 64 bytes per rank and step")
    add("--profile", action="append", choices=PROFILES, help="only this network; may be repeated")
    add("--report", type=Path, help="folder for target.json, target.png and performance.md's table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    found: dict[str, dict[str, Curve]] = {}
    for profile in options.profile or PROFILES:
        for name in METHODS:
            console.print(f"{profile}: {name} ...", markup=False)
            try:
                curve = run(profile, name, options)
            except LossyError as error:
                console.print(str(error), markup=False)
                return 1
            found.setdefault(profile, {})[name] = curve
            console.print(f"  {curve[-1][0]:.1f} s, loss {curve[-1][2]:.4f}", markup=False)
    results = {
        "commit": commit("target"),
        "steps": options.steps,
        "width": options.width,
        "batch": options.batch,
        "networks": {
            profile: {
                "target": target(curves),
                "seconds": {name: reached(curves[name], target(curves)) for name in curves},
                "curves": curves,
            }
            for profile, curves in found.items()
        },
    }
    print(table(results))
    if options.report:
        write(results, options.report)
    return 0


def run(profile: str, name: str, options: argparse.Namespace) -> Curve:
    """One training. Raises LabError without a laboratory, LossyError where a rank fails."""
    backend, method, environment = METHODS[name]
    config = TrainConfig(
        backend=backend,
        method=method,
        loss=0.0,
        steps=options.steps,
        seed=1,
        layers=2,
        width=options.width,
        context=64,
        batch=options.batch,
        events="",
    )
    with tempfile.TemporaryDirectory() as folder, Lab(profile) as lab:
        out = Path(folder) / "curve"
        run_job(lab, "benchmarks.target.rank", asdict(config), out, RUN_SECONDS, environment)
        curve: Curve = json.loads(out.read_text())
    return curve


def target(curves: dict[str, Curve]) -> float:
    """The loss that all reach: the worst of the best."""
    return max(min(loss for _, _, loss in curve) for curve in curves.values())


def reached(curve: Curve, loss: float) -> float:
    """Seconds until the curve is at ``loss``, on a straight line between its points."""
    for (before, _, high), (after, _, low) in pairwise(curve):
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 1.0
            return before + min(1.0, max(0.0, share)) * (after - before)
    raise ValueError(f"a loss of {loss} is never reached")


def table(results: dict[str, Any]) -> str:
    rows = []
    for profile, network in results["networks"].items():
        seconds = network["seconds"]
        for name, spent in seconds.items():
            final = network["curves"][name][-1]
            rows.append(
                [
                    profile,
                    name,
                    f"{spent:.1f}",
                    f"{seconds['gloo'] / spent:.1f}x",
                    f"{final[0]:.1f}",
                    f"{final[2]:.4f}",
                ]
            )
    head = ["network", "method", "seconds to the loss", "against gloo", "seconds for all steps"]
    return markdown([*head, "loss at the end"], rows)


def write(results: dict[str, Any], folder: Path) -> None:
    (folder / "target.json").write_text(json.dumps(results, indent=1) + "\n")
    page = folder / "performance.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(between(text, "target", table(results)), encoding="utf-8")
    networks = results["networks"]
    size = (6.0 * len(networks), 4.0)
    figure, axes = plt.subplots(1, len(networks), figsize=size, layout="constrained", squeeze=False)
    for axis, (profile, network) in zip(axes[0], networks.items(), strict=True):
        for name, curve in network["curves"].items():
            seconds, _, losses = zip(*curve, strict=True)
            axis.plot(seconds, losses, color=COLOURS[name], label=name)
        axis.axhline(network["target"], color="grey", linestyle=":")
        axis.set_title(f"{profile}: the same training, the same steps")
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("loss on held-out text, nats per byte")
        axis.legend()
    figure.savefig(folder / "target.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

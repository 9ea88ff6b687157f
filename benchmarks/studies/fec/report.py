"""The tables and the picture: residual loss against overhead, and the time on a long path."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt

from benchmarks.studies.quality.report import between, markdown
from lossycoll.options.fields import Options

ARMS: Final[dict[str, dict[str, Any]]] = {
    "nothing": {"fec": 0},
    "fec=0.05": {"fec": 0.05},
    "fec=0.1": {"fec": 0.1},
    "fec=0.2": {"fec": 0.2},
    "fec=auto": {"fec": "auto"},
    "repair=1": {"repair": 1},
    "fec=0.1, repair=1": {"fec": 0.1, "repair": 1},
}
"""Ways to deal with loss, as options."""
MARKS: Final = {"fec=auto": "*", "repair=1": "s", "fec=0.1, repair=1": "D"}
LEFT_OUT: Final = 1 / 3
"""Of each series of times: the first operations find the path's rate."""


def left(loss: float, size: int) -> float:
    """What single losses leave with sets of ``size`` and their parity: a packet is missing if it
    is lost and one of the others of its set or the parity is, too."""
    return loss * (1 - (1 - loss) ** size)


def predicted(arm: str, loss: float) -> float | None:
    """What single losses leave with an arm; None where no formula is given."""
    options = Options(**ARMS[arm])
    size, auto = options.parity_sets
    if auto or (size and options.repair):
        return None
    return left(loss, size) if size else loss ** (1 + options.repair)


def write(found: Mapping[str, Any], folder: Path) -> None:
    """fec.png, and the tables between the marks of performance.md."""
    page = folder / "performance.md"
    text = page.read_text(encoding="utf-8")
    if "residual" in found:
        text = between(text, "fec", table(found["residual"]["rows"]))
        draw(found["residual"]["rows"], folder / "fec.png")
    if "lab" in found:
        text = between(text, "fec-lab", lab_table(found["lab"]["arms"]))
    page.write_text(text, encoding="utf-8")


def _cell(row: Mapping[str, Any]) -> str:
    wanted = "" if row["predicted"] is None else f" ({_share(row['predicted'])})"
    return f"{_share(row['residual'])}{wanted} for {row['overhead']:.1%}"


def _share(value: float) -> str:
    return f"{100 * value:.2g}%" if value < 0.1 else f"{100 * value:.3g}%"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["lost", *ARMS]
    out = []
    for loss, burst in dict.fromkeys((row["loss"], row["burst"]) for row in rows):
        cells = {r["arm"]: _cell(r) for r in rows if (r["loss"], r["burst"]) == (loss, burst)}
        name = f"{loss:.1%}" + (f" in bursts of {burst}" if burst > 1 else "")
        out.append([name, *(cells[arm] for arm in ARMS)])
    return markdown(head, out)


def lab_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, arm in arms.items():
        times = sorted(arm["seconds"][int(LEFT_OUT * len(arm["seconds"])) :])
        median, longest = statistics.median(times), times[-1]
        rows.append(
            [name, f"{1e3 * median:.0f}", f"{1e3 * longest:.0f}", _share(arm["missing"])],
        )
    return markdown(["", "median, ms", "longest, ms", "missing"], rows)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel for single losses, one for bursts; a colour for each loss."""
    bursts = list(dict.fromkeys(row["burst"] for row in rows))
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    size = (5.2 * len(bursts) + 1.8, 4.2)
    figure, axes = plt.subplots(1, len(bursts), figsize=size, layout="constrained", sharey=True)
    for axis, burst in zip(axes, bursts, strict=True):
        for loss, colour in zip(losses, plt.colormaps["viridis"].resampled(5).colors, strict=False):
            here = {r["arm"]: r for r in rows if (r["loss"], r["burst"]) == (loss, burst)}
            fixed = [row for arm, row in here.items() if arm not in MARKS]
            axis.plot(*_points(fixed), "o-", color=colour, markersize=4, label=f"{loss:.1%} lost")
            for arm, mark in MARKS.items():
                axis.plot(*_points([here[arm]]), mark, color=colour, markersize=8)
            sizes = [40, 20, 14, 10, 8, 6, 5, 4]
            wanted = [100 * left(loss, size) for size in sizes]
            if burst == 1:
                axis.plot([100 / size for size in sizes], wanted, ":", color=colour)
        axis.set_yscale("log")
        axis.set_title("single losses" if burst == 1 else f"bursts of {burst} on average")
        axis.set_xlabel("packets sent besides, %")
    for arm, mark in MARKS.items():
        axes[-1].plot([], [], mark, color="black", label=arm)
    axes[-1].plot([], [], ":", color="black", label="p (1 - (1 - p)^g)")
    axes[0].set_ylabel("packets still missing, %")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _points(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Nothing missing has no place on a logarithmic axis."""
    shown = [row for row in rows if row["missing"]]
    return [100 * row["overhead"] for row in shown], [100 * row["residual"] for row in shown]

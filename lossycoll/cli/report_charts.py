"""The charts of `lossycoll report`, as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")  # There may be no display.

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from .report import Chart

COLUMNS = 2
LINES = ("-", "--", ":")


def draw(charts: Sequence[Chart], seconds: float, figures: list[str]) -> None:
    """Adds one picture with all charts."""
    if not charts:
        return
    rows = -(-len(charts) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(11, 2.9 * rows), layout="constrained", squeeze=False
    )
    places = [place for row in axes for place in row]
    for place in places[len(charts) :]:
        place.set_axis_off()
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for place, chart in zip(places, charts, strict=False):
        for number, (name, points) in enumerate(chart.series.items()):
            colour = colours[number % len(colours)]
            style = {"marker": "o", "markersize": 3} if len(points) < 3 else {}
            style["linestyle"] = LINES[number % len(LINES)]  # equal ones lie on each other
            place.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=1.4, **style)
        place.set_title(chart.title, fontsize=10)
        place.set_xlabel("seconds", fontsize=8)
        place.set_ylabel(chart.unit, fontsize=8)
        place.set_ylim(bottom=0)
        place.set_xlim(0, seconds or 1)
        place.tick_params(labelsize=8)
        place.grid(alpha=0.3)
        if chart.is_share:
            place.yaxis.set_major_formatter(PercentFormatter(1.0))
        place.legend(fontsize=7, ncols=2 if len(chart.series) > 6 else 1, loc="best")
    text = io.BytesIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
    picture = text.getvalue().decode()
    figures.append(picture[picture.find("<svg") :])

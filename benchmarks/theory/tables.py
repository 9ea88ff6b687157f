"""The tables of docs/theory.md, as data: each is a head and what its rows are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.tables import markdown

from .measure import VARIANTS
from .optireduce import LOSSES, PUBLISHED, TRANSPOSE
from .orders import LOSSES as ORDERED_LOSSES
from .owners import LONGER, RATES
from .parity import PACKETS
from .smaller import SIZES
from .spread import BETWEEN, BUCKETS, BURSTS

Found = dict[str, Any]
ALGORITHMS = ("ring", "transpose", "reduce_scatter")
BY_HOSTS = ("all_reduce", "reduce_scatter")
AGES = range(1, 6)


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Callable[[Found], Iterable[Sequence[Any]]]

    def text(self, found: Found) -> str:
        return markdown(self.head, [[_cell(value) for value in row] for row in self.rows(found)])


def _pair(row: dict[str, Any], name: str = "measured", predicted: str = "predicted") -> str:
    return f"{row[name]:.3f} ({row[predicted]:.3f})"


def across(part: str, down: str, along: str, name: str = "measured") -> Table:
    """Measured figures beside predicted ones: a row for each value of ``down``, a column for each
    of ``along``. The names of both are those of the columns."""

    def rows(found: Found) -> Iterable[Sequence[Any]]:
        by: dict[Any, list[str]] = {}
        for row in found[part]:
            by.setdefault(row[down], []).append(_pair(row, name))
        return ([value, *cells] for value, cells in by.items())

    return Table(ALONG[along], rows)


ALONG = {
    "loss": ("N", *(f"p = {loss}" for loss in (0.05, 0.1, 0.2, 0.3, 0.4))),
    "burst": ("p", *(f"runs of {burst:g}" for burst in (1.5, 2, 4, 8, 16))),
}


def unbiased(found: Found) -> Iterable[Sequence[Any]]:
    by_case: dict[str, dict[str, float]] = {}
    for row in found["unbiased"]:
        by_case.setdefault(row["case"], {})[row["algorithm"]] = row["standard_errors"]
    return ([case, *(f"{row[name]:.1f}" for name in ALGORITHMS)] for case, row in by_case.items())


def weights(found: Found) -> Iterable[Sequence[Any]]:
    by: dict[float, list[str]] = {}
    for how in ("count", "inverse_probability"):
        for row in found["estimators"]:
            # Counting has the same variance at any mean: two of them show it.
            if row["estimator"] == how and (how, row["mean"]) != ("count", 1):
                by.setdefault(row["loss"], []).append(_pair(row))
    return ([loss, *cells] for loss, cells in by.items())


def broadcast(found: Found) -> Iterable[Sequence[Any]]:
    moving = {row["loss"]: row for row in found["broadcast"] if row["mean"]}
    for row in found["broadcast"]:
        if not row["mean"]:
            yield [
                *(row["loss"], _pair(row, "drift"), f"{row['published']:.3f}"),
                _pair(moving[row["loss"]], "drift"),
                _pair(row, "from_owner", "from_owner_predicted"),
            ]


def older(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["broadcast"]:
        if not row["mean"]:
            loss = row["loss"]
            yield [loss, *(f"{row['older'][age]:.2g} ({loss**age:.2g})" for age in AGES)]


def steps(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["steps"]:
        yield [
            *(row["loss"], f"{row['per_step']:.4f} ({row['per_step_predicted']:.4f})"),
            f"{row['free'][-1]:.0f}",
            *(f"{part['mean']:.2f} ({part['predicted']:.2f})" for part in row["bound"]),
        ]


def states(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["steps"]:
        for half, name in enumerate(("first", "second")):
            yield [
                *(row["loss"], name),
                *(f"{one['halves'][half]:#.3g} ({one['predicted']:#.3g})" for one in row["states"]),
            ]


def trained_states(found: Found) -> Iterable[Sequence[Any]]:
    by: dict[tuple[str, str], list[str]] = {}
    for row in (*found["momentum"], *found["adam"]):
        for name, halves in row["halves"].items():
            cells = by.setdefault((row["optimizer"], name), [])
            cells += [f"{half:.2e}" for half in halves]
    return ([*of, *cells] for of, cells in by.items())


UNBIASED = Table(("loss", "ring", "transpose", "reduce-scatter"), unbiased)
WEIGHTS = Table(
    ("p", "count, mean 0", "count, mean 2", *(f"weighted, mean {mean}" for mean in range(3))),
    weights,
)
BROADCAST = Table(
    ("p", "two receivers, m = 0", "2p/(1+p)", "two receivers, m = 0.5", "owner to receiver, m = 0"),
    broadcast,
)
OLDER = Table(("p", *(f"K = {age}" for age in AGES)), older)
STEPS = Table(
    ("p", "without, per step", "after 5,000 steps", *(f"repair {number}" for number in range(3))),
    steps,
)
STATES = Table(("p", "half", "momentum_buffer", "exp_avg", "exp_avg_sq"), states)
TRAINED_STATES = Table(
    (
        *("optimizer", "distance of"),
        *(f"{how}, {half} half" for how in ("without", "T = 16") for half in ("first", "second")),
    ),
    trained_states,
)


def worth_its_bytes(found: Found) -> Iterable[Sequence[Any]]:
    """A row for each loss and optimizer: the drift, and KiB that a step brings to one value."""
    rows: dict[tuple[float, str], list[str]] = {}
    for row in found["optimizers"]:
        sent = f", {row['bytes_per_step'] / 1024:.1f} KiB" if row["period"] else ""
        rows.setdefault((row["loss"], row["optimizer"]), []).append(f"{row['drift']:.2e}{sent}")
    return ([*of, *cells] for of, cells in rows.items())


def _named(period: int, repair: int, state: bool) -> str:
    if not period:
        return "without"
    return f"T = {period}" + ("" if repair else ", no repair") + (", state too" if state else "")


WORTH_ITS_BYTES = Table(
    ("p", "optimizer", *(_named(*variant) for variant in VARIANTS)), worth_its_bytes
)
PARTIAL_SUMS = Table(
    ("hosts of", "p", "mean", "all-reduce", "reduce-scatter"),
    lambda found: (
        [
            *(row[name] for name in ("hosts", "loss", "mean")),
            *(f"{row[name]:.3f} ({row[f'{name}_predicted']:.3f})" for name in BY_HOSTS),
        ]
        for row in found["partial sums"]
    ),
)


def left_missing(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["parity"]:
        cells = [row["by_packets"][str(n)] for n in PACKETS]
        yield [
            *(f"{100 * row['loss']:.0f}%", f"{row['burst']:.0f}"),
            *(
                f"{c['parity']:.2f}: {_percent(c['engines'])}, {_percent(c['measured'])} "
                f"({_percent(c['predicted'])})"
                for c in cells
            ),
        ]


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def longer_streams(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["owners"]["longer"]:
        cells = [row["by_times"][str(times)] for times in LONGER]
        yield [
            *(f"{100 * row['loss']:.0f}%", f"{row['burst']:.0f}", row["packets"]),
            *(f"{c['parity']:.2f}: {_percent(c['left'])}" for c in cells),
        ]


def hard_case(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["owners"]["hard"]:
        drawn = "" if row["drawn"] is None else f", {_percent(row['drawn'])}"
        yield [
            *(row["owners"], row["rounds"], f"{_percent(row['left'])}{drawn}"),
            *(f"{row['busiest']:.1f}", *(f"{1e3 * s:.0f}" for s in row["seconds"].values())),
        ]


SPREAD_OVER = {
    "in order": "neighbours",
    "stream": "the stream",
    "port": f"the stream, {BETWEEN - 1} others between",
    "buckets": f"{BUCKETS} buckets",
    "owners": "the longer stream of few owners",
}


def spread_over(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["spread"]["ways"]:
        cells = [row["by"][way] for way in SPREAD_OVER]
        yield [
            *(f"{100 * row['loss']:.0f}%", f"{row['burst']:.0f}", row["packets"]),
            *(f"{c['parity']:.2f}: {_percent(c['left'])}" for c in cells),
        ]


def lengths_needed(found: Found) -> Iterable[Sequence[Any]]:
    rows = found["spread"]["needed"]
    for loss in sorted({row["loss"] for row in rows}):
        lengths = {row["burst"]: row["packets"] for row in rows if row["loss"] == loss}
        yield [f"{100 * loss:.0f}%", *(lengths[burst] for burst in BURSTS)]


def smaller_packets(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["smaller"]["rows"]:
        cells = row["by_size"]
        most = max(cells, key=int)
        yield [
            *(f"{100 * row['loss']:.0f}%", f"{row['burst']:.0f}", row["packets"]),
            *(
                f"{c['bytes']:.2f}: {_percent(c['drawn'])} ({_percent(c['left'])})"
                for c in cells.values()
            ),
            _percent(cells[most]["in_time"]),
        ]


def mixing(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["rps"]:
        cells = (
            f"{row[a]:.4f} ± {row[f'{a}_error']:.4f} ({row[f'{a}_predicted']:.5f})"
            for a in ("a1", "a2")
        )
        yield [row["world"], f"{100 * row['loss']:.0f}%", *cells]


def sent_once(found: Found) -> Iterable[Sequence[Any]]:
    """Errors by algorithm and loss, and how many times those of the transpose."""
    errors = {(row["algorithm"], row["faults"]): row for row in found["best effort"]}
    for algorithm, published in PUBLISHED.items():
        cells = []
        for faults in LOSSES:
            row, least = errors[algorithm, faults], errors[TRANSPOSE, faults]
            times = row["predicted"] / least["predicted"]
            cells.append(
                f"{row['error']:.3f} ± {row['deviation']:.3f} ({row['predicted']:.3f}); {times:.1f}"
            )
        yield [algorithm, *cells, f"{published}; {published / PUBLISHED[TRANSPOSE]:.1f}"]


SHOWN_ROUNDS = (1, 2, 3, 4, 6, 8)
SHOWN_IN_FEW_BITS = (1, 2, 4, 8, 12, 16)
RARE = 0.25
"""A standard error above this part of a figure: it is of a few packets, and isn't shown."""


def in_orders(found: Found) -> Iterable[Sequence[Any]]:
    """Errors by order: of elements, of rows' sums, and the deviation between calls."""
    by: dict[str, list[Any]] = {}
    for row in found["orders"]:
        cells = by.setdefault(row["order"], [row["order"], f"{row['ms_per_mb']:.1f}"])
        element = f"{row['element']:.2f} ± {row['element_error']:.2f} ({row['predicted']:.2f})"
        cells.append(f"{element}; {row['row']:.2f} ± {row['row_error']:.2f}")
    return by.values()


def _said(faults: str) -> str:
    """As in "loss=0.1,burst=4"."""
    loss, _, burst = faults.partition(",burst=")
    share = f"{100 * float(loss.partition('=')[2]):.0f}%"
    return f"{share}, bursts of {burst}" if burst else share


def _beside(share: dict[str, float], predicted: float) -> str:
    return f"{share['value']:.4f} ({predicted:.4f})"


def _away(row: dict[str, Any]) -> float:
    """Of a row's figures the farthest from what is predicted, in standard errors."""
    shares = [(name, row[name]) for name in ("variance", "moved", "lean") if row[name]]
    away: list[float] = [
        abs(one["value"] - row["predicted"][name]) / one["error"] for name, one in shares
    ]
    return max(away)


def _sizes(row: dict[str, Any]) -> str:
    return " + ".join(map(str, row["sizes"]))


def groups_without_loss(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["groups"]["single"]:
        wanted = row["predicted"]["variance"]
        if not row["loss"] and wanted:
            off = row["variance"]["value"] / wanted - 1
            of = f"{row['peers']} in {row['grid']}"
            yield [of, _sizes(row), _beside(row["variance"], wanted), f"{100 * off:+.2f}%"]


def groups_with_loss(found: Found) -> Iterable[Sequence[Any]]:
    for row in sorted(found["groups"]["single"], key=lambda one: (-one["peers"], one["sizes"])):
        if row["loss"] and row["grid"] != "2x2x2":  # groups like those of 2x4
            wanted = row["predicted"]
            lean = _beside(row["lean"], wanted["lean"]) if row["lean"] else "-"
            yield [
                *(_sizes(row), f"{100 * row['loss']:.0f}%"),
                *(_beside(row[name], wanted[name]) for name in ("variance", "moved")),
                *(lean, f"{row['contributions']:.2f} ({wanted['contributions']:.2f})"),
                f"{_away(row):.1f}",
            ]


def _after(row: dict[str, Any], name: str, rounds: Sequence[int]) -> Iterable[str]:
    """Figures after so many rounds, beside what is predicted if anything is."""
    for number in rounds:
        if number > len(row[name]):
            yield ""
            continue
        share, wanted = row[name][number - 1], row[f"{name}_predicted"]
        rare = share["error"] > RARE * share["value"]
        shown = "rare" if rare and share["value"] else f"{share['value']:.2g}"
        yield shown + (f" ({wanted[number - 1]:.2g})" if wanted else "")


def groups_in_rounds(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["groups"]["many"]:
        if row["wire"] != "same":
            continue
        of = (f"{row['peers']} in {row['grid']}", f"{100 * row['loss']:.0f}%")
        product = [f"{one:.2g}" for one in row["product"]]
        yield [*of, "variance", *_after(row, "variance", SHOWN_ROUNDS)]
        yield [
            *of,
            "groups at random",
            *(product[n - 1] if n <= len(product) else "" for n in SHOWN_ROUNDS),
        ]
        if row["loss"]:
            yield [*of, "mean has moved", *_after(row, "moved", SHOWN_ROUNDS)]


def groups_in_few_bits(found: Found) -> Iterable[Sequence[Any]]:
    for row in found["groups"]["many"]:
        if row["wire"] != "same":
            for name, said in (("variance", "variance"), ("moved", "mean has moved")):
                shown = (f"{row[name][n - 1]['value']:.2g}" for n in SHOWN_IN_FEW_BITS)
                yield [f"{100 * row['loss']:.0f}%", said, *shown]


GROUPS_WITHOUT_LOSS = Table(("peers", "groups of", "variance left", "off by"), groups_without_loss)
GROUPS_WITH_LOSS = Table(
    (
        *("groups of", "p", "variance left", "the mean moves", "leans to the owner"),
        *("a value is the mean of", "farthest, standard errors"),
    ),
    groups_with_loss,
)
GROUPS_IN_ROUNDS = Table(("peers", "p", "after rounds", *map(str, SHOWN_ROUNDS)), groups_in_rounds)
GROUPS_IN_FEW_BITS = Table(("p", "after rounds", *map(str, SHOWN_IN_FEW_BITS)), groups_in_few_bits)
PARITY = Table(("p", "in bursts of", *(f"{n:,} packets" for n in PACKETS)), left_missing)
LONGER_STREAMS = Table(
    ("p", "in bursts of", "packets", *(f"streams x {times}" for times in LONGER)), longer_streams
)
HARD_CASE = Table(
    (
        *("owners of 8", "rounds", "left missing", "busiest rank sends"),
        *(f"ms at {rate}" for rate in RATES),
    ),
    hard_case,
)
SPREAD = Table(("p", "in bursts of", "packets", *SPREAD_OVER.values()), spread_over)
SMALLER = Table(
    (
        *("p", "in bursts of", "packets"),
        *("whole" if size == 1 else f"1/{size}" for size in SIZES),
        f"1/{SIZES[-1]}, bursts of a time",
    ),
    smaller_packets,
)
MIXING = Table(("N", "p", "a1", "a2"), mixing)
SENT_ONCE = Table(("algorithm", *(_said(faults) for faults in LOSSES), "OptiReduce's"), sent_once)
IN_ORDERS = Table(("order", "ms per MB", *(_said(faults) for faults in ORDERED_LOSSES)), in_orders)
NEEDED = Table(("p", *(f"bursts of {burst:.0f}" for burst in BURSTS)), lengths_needed)


def when(found: Found) -> str:
    """By which code and where the parts were measured, those of one commit together."""
    parts: dict[tuple[str, str, str], list[str]] = {}
    for name, at in found["measured"].items():
        parts.setdefault((at["date"], at["commit"], at["machine"]), []).append(name)
    said = [
        f"{', '.join(names)}: {date}, commit {commit}, {machine}"
        for (date, commit, machine), names in parts.items()
    ]
    return "Measured, by part: " + "; ".join(said) + "."


def text(found: Found) -> str:
    """All tables, and when the parts were measured."""
    return "\n\n".join(marked(found).values())


def marked(found: Found) -> dict[str, str]:
    """What stands between the marks of docs/theory.md."""
    return {
        "theory-when": when(found),
        "theory-unbiased": UNBIASED.text(found),
        "theory-variance": across("inflation", "world", "loss").text(found),
        "theory-stratified": across("stratified", "world", "loss").text(found),
        "theory-weights": WEIGHTS.text(found),
        "theory-broadcast": BROADCAST.text(found),
        "theory-older": OLDER.text(found),
        "theory-runs": across("bursts", "loss", "burst", "drift").text(found),
        "theory-steps": STEPS.text(found),
        "theory-states": STATES.text(found),
        "theory-trained-states": TRAINED_STATES.text(found),
        "theory-partial-sums": PARTIAL_SUMS.text(found),
        "theory-parity": PARITY.text(found),
        "theory-owners": LONGER_STREAMS.text(found),
        "theory-owners-cost": HARD_CASE.text(found),
        "theory-spread": SPREAD.text(found),
        "theory-lengths": NEEDED.text(found),
        "theory-rps": MIXING.text(found),
        "theory-best-effort": SENT_ONCE.text(found),
        "theory-orders": IN_ORDERS.text(found),
        "theory-smaller": SMALLER.text(found),
        "theory-groups": GROUPS_WITHOUT_LOSS.text(found),
        "theory-groups-loss": GROUPS_WITH_LOSS.text(found),
        "theory-groups-rounds": GROUPS_IN_ROUNDS.text(found),
        "theory-groups-bits": GROUPS_IN_FEW_BITS.text(found),
        "theory-optimizers": WORTH_ITS_BYTES.text(found),
    }


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Figures that stand in sentences and in typed rows are those of the tables of the studies.

:data:`STATED` has, for each, the page, the words around it, and the cell or cells that it comes
from. A sentence of another page that cites a study for a figure must be in that list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repository.test_site import tree

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
Row = Mapping[str, str]


@cache
def text(page: str) -> str:
    """A page without line breaks."""
    folder = ROOT if page == "README" else DOCS
    return " ".join((folder / f"{page}.md").read_text(encoding="utf-8").split())


@cache
def rows(place: str) -> tuple[Row, ...]:
    """The rows of ``"page#mark"``, by heading."""
    page, _, mark = place.partition("#")
    lines = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    inside = lines.partition(f"<!-- {mark}: begin -->")[2].partition(f"<!-- {mark}: end -->")[0]
    table = [line for line in inside.splitlines() if line.startswith("|")]
    assert table, place
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return tuple(dict(zip(head, cells, strict=True)) for cells in body)


def number(cell: str, n: int = 0) -> float:
    """The first number of a cell, or its ``n``-th after that."""
    return float(re.findall(NUMBER, cell)[n].replace(",", ""))


def at(place: str, *first: str, n: int = 0) -> float:
    """A number of a table: that of the only row that begins with these cells, below the heading
    given last."""
    *key, heading = first
    (row,) = (row for row in rows(place) if [*row.values()][: len(key)] == key)
    return number(row[heading], n)


def span(found: Iterator[float]) -> list[float]:
    """The least and the most."""
    values = list(found)
    return [min(values), max(values)]


def agrees(said: str, exact: float) -> bool:
    """Whether a figure is rounded from ``exact``, to its decimals, or its last digit but zeros."""
    bare = said.replace(",", "").lstrip("+-")
    whole, _, decimals = bare.partition(".")
    unit = 10.0 ** -len(decimals)
    if not decimals and len(whole) > 2:
        unit = 10.0 ** (len(whole) - max(2, len(whole.rstrip("0"))))
    return abs(float(said.replace(",", "")) - exact) <= unit / 2 + 1e-9


def test_rounded_figures_are_told_from_others() -> None:
    for said, exact in {
        "1.2": 1.22,
        "16": 16.3,
        "220": 221.6,
        "-0.03": -0.026,
        "40.2": 40.182,
    }.items():
        assert agrees(said, exact)
    for said, exact in {"1.2": 1.26, "16": 16.6, "105": 106, "0.03": -0.026, "2.0": 1.9}.items():
        assert not agrees(said, exact)


COMPARED = "times gloo's speed"


def one_host(of: str, ranks: int, size: int) -> float:
    """gloo's microseconds over lossy's, as one-host.json has them."""
    (row,) = (
        row
        for row in json.loads((DOCS / "one-host.json").read_text(encoding="utf-8"))["rows"]
        if (row["collective"], row["ranks"], row["bytes"]) == (of, ranks, size)
    )
    return float(row["gloo_us"] / row["lossy_us"])


def hosts(heading: str, *calls: str) -> list[float]:
    """Of all sizes of calls on one host."""
    found = rows("performance#one-host")
    return span(number(row[heading]) for row in found if row["call"] in calls)


def wire(network: str, heading: str) -> float:
    return at("performance#wire", network, heading)


def wires(heading: str, *networks: str) -> list[float]:
    """Of several networks, 4 and 25 MiB each."""
    return [wire(f"{of}, {size} MiB", heading) for of in networks for size in (4, 25)]


def cubic() -> list[float]:
    """How many times as long gloo over cubic takes, at 1% and more in single packets."""
    near, far = (f"2 hosts, 1000 Mbit/s, {rtt} ms, 1.0%" for rtt in (20, 80))
    cases = [f"{near}, 4 MiB", f"{near}, 25 MiB", f"{far}, 4 MiB"]
    return span(wire(of, "gloo") / wire(of, "lossy") for of in cases)


def slow(*of: tuple[int, range], lost: str = "0%") -> list[float]:
    """gloo's time over lossy's, in a loop and after computing: hosts, and Mbit/s of links."""
    return span(
        number(row[f"gloo, {when}"]) / number(row[f"lossy, {when}"])
        for row in rows("performance#slow-links")
        for when in ("loop", "computing")
        if row["lost"] == lost
        and any(int(row["hosts"]) == n and int(row["Mbit/s"]) in rates for n, rates in of)
    )


SLOW, FAST = range(20, 101), range(1000, 1001)


def of_limit(hosts: int) -> list[float]:
    """Lossy's loop over bytes and delays of two phases of 10 ms, by rate, of clean links and the
    largest size."""
    clean = [r for r in rows("performance#slow-links") if r["lost"] == "0%"]
    largest: dict[int, dict[str, str]] = {}
    for row in sorted(clean, key=lambda row: number(row["size"])):
        if int(row["hosts"]) == hosts:
            largest[int(row["Mbit/s"])] = row
    return [
        number(row["lossy, loop"])
        / (2 * (hosts - 1) / hosts * number(row["size"]) * 8.388608e3 / rate + 20)
        for rate, row in sorted(largest.items())
    ]


def clean(call: str) -> list[float]:
    """The least and the most of gloo's bandwidth, as the verdict has them."""
    page = text("performance")
    said = re.search(rf"- {call}: times gloo's bus bandwidth: ({NUMBER}) to ({NUMBER}),", page)
    assert said is not None
    return [float(one) for one in said.groups()]


def site(variant: str, heading: str = "median, ms") -> float:
    return at("performance#sites", variant, heading)


def target(network: str, variant: str) -> float:
    return at("performance#time-to-target", network, variant, "seconds to the loss")


def slower(method: str) -> list[float]:
    """A method's time in each network, over plain lossy's."""
    networks = ("cross-dc", "home", "transatlantic", "two-sites")
    return [target(of, f"lossy, {method}") / target(of, "lossy") for of in networks]


def speed(network: str, *variants: str) -> list[float]:
    of_gloo = "against gloo's faster"
    return [at("performance#time-to-target", network, of, of_gloo) for of in variants]


BOTH = ("lossy, DriftBound", "lossy, ShardedOptimizer")
DEMO = "demo#demo"
BOUNDED, SHARDED = "bounded, 10% lost", "sharded, 10% lost"


def demo(figure: str, run: str) -> float:
    return at(DEMO, figure, run)


def perplexity(run: str) -> float:
    return demo("perplexity per byte (rank 0)", run)


def worse(run: str) -> float:
    """In percent of gloo's perplexity."""
    return 100 * (perplexity(run) / perplexity("gloo") - 1)


def lost(share: str, method: str, heading: str) -> float:
    return at("quality#demo-losses", share, method, heading)


def bounded(heading: str) -> list[float]:
    return [lost(share, "DDP with DriftBound", heading) for share in ("1%", "5%")]


def more_bytes() -> float:
    """In percent of plain DDP's in the demo."""
    return 100 * (demo("MB sent", BOUNDED) / demo("MB sent", "lossy, 10% lost") - 1)


def tried(heading: str) -> list[float]:
    methods = ("DDP with DriftBound", "ShardedOptimizer")
    return span(lost(share, of, heading) for share in ("1%", "5%") for of in methods)


def sealed(mark: str, wire: str, size: str = "25 MiB") -> float:
    return at(f"performance#{mark}", wire, size, "encrypted")


def openssl(mark: str) -> float:
    """Major and minor version."""
    inside = text("performance").partition(f"<!-- {mark}: begin -->")[2]
    return float(re.findall(r"OpenSSL (\d+\.\d+)", inside)[0])


def noticed() -> float:
    """Seconds until a killed rank is named by all others: the slower of two ranks."""
    killed = ("measured-costs#detection", "`raise`")
    return max(at(*killed, f"rank {rank}", "median, ms") for rank in (0, 3)) / 1000


def simulated(name: str) -> float:
    from lossycoll.simulate.control import CONNECTION_BYTES, COSTS

    return {
        "us of a message": 1e6 * COSTS.receive,
        "ms of a connection": 1e3 * COSTS.connect,
        "KB of a connection": CONNECTION_BYTES / 1000,
    }[name]


class Stated(NamedTuple):
    page: str
    words: str
    """A regular expression with a group for each figure."""
    figures: Callable[[], Sequence[float]]


HOSTS = "2 hosts, 1000 Mbit/s"
NEAR, FAR = f"{HOSTS}, 20 ms, 1.0%", f"{HOSTS}, 80 ms, 1.0%"
FASTER, RELIABLE, LIMIT = "gloo / lossy", "gloo / reliable", "against the limit"
SWARM = "moshpit#swarm"
FAULTS, INT8 = "moshpit, faults", "moshpit, int8, faults"
N = f"({NUMBER})"

STATED = (
    Stated(
        "README",
        f"DriftBound ends within {N}% of gloo's perplexity, for {N} to {N}% more bytes",
        lambda: [
            max(map(abs, [*bounded("change of perplexity"), worse(BOUNDED)])),
            *span(iter([*bounded("more bytes than DDP"), more_bytes()])),
        ],
    ),
    Stated(
        "README",
        f"`cross-dc` takes {N} s instead of {N} s, and `home` in float32 {N} s instead of {N} s",
        lambda: [target(of, by) for of in ("cross-dc", "home") for by in (BOTH[0], "lossy")],
    ),
    Stated(
        "README",
        rf"perplexity of the demo's GPT, no loss \| {N} \| {N} \|",
        lambda: [perplexity("gloo"), perplexity("clean")],
    ),
    *(
        Stated("README", rf"{row} \| - \| {N} \({N}%\)", lambda of=of: [perplexity(of), worse(of)])  # type: ignore[misc]
        for row, of in {
            r"none resent \(DDP\)": "lossy, 10% lost",
            r"1% missing\)": BOUNDED,
            "the same, ShardedOptimizer": SHARDED,
        }.items()
    ),
    Stated(
        "README",
        rf"with DriftBound \| - \| {N}, {N}, {N} MB",
        lambda: [demo("MB sent", of) for of in ("clean", "lossy, 10% lost", BOUNDED)],
    ),
    *(
        Stated(
            "README",
            rf"all-reduce of {name}.*? {N} times gloo's with 2 ranks, {N} with 4",
            lambda size=size: [one_host("all_reduce", ranks, size) for ranks in (2, 4)],  # type: ignore[misc]
        )
        for name, size in {"25 MiB": 25 << 20, "4 KiB": 4 << 10}.items()
    ),
    Stated(
        "README",
        rf"two hosts, 1 Gbit/s, 20 ms, 1% lost .*? {N} ms \(TCP bbr\), {N} s \(cubic\) \| {N} ms",
        lambda: [
            wire(f"{NEAR}, 25 MiB", "gloo, bbr"),
            wire(f"{NEAR}, 25 MiB", "gloo") / 1000,
            wire(f"{NEAR}, 25 MiB", "lossy"),
        ],
    ),
    Stated(
        "README",
        rf"the same, 80 ms \| {N} ms \(bbr\) \| {N} ms",
        lambda: [wire(f"{FAR}, 25 MiB", of) for of in ("gloo, bbr", "lossy")],
    ),
    Stated(
        "README",
        rf"two sites of two hosts of two ranks, .*? \| {N} ms \(bbr\) \| {N} ms",
        lambda: [site("gloo-bbr"), site("auto")],
    ),
    Stated(
        "README",
        f"calls of 1 MiB and more were compared. An all-reduce has {N} to {N} times gloo's "
        f"bandwidth, and a broadcast {N} to {N} times",
        lambda: [*clean("all_reduce"), *clean("broadcast")],
    ),
    Stated(
        "README",
        f"links of 20 to 100 Mbit/s .*? {N} to {N} times gloo's speed with up to 4 hosts. With 8 "
        f"hosts it has {N} to {N} times. With 4 hosts at 1 Gbit/s it has {N} to {N} times. With 1% "
        f"lost at 50 Mbit/s it has {N} to {N} times with 2 and 4 hosts, and {N} to {N} times "
        "with 8",
        lambda: [
            *slow((2, SLOW), (4, SLOW)),
            *slow((8, SLOW)),
            *slow((4, FAST)),
            *slow((2, SLOW), (4, SLOW), lost="1%"),
            *slow((8, SLOW), lost="1%"),
        ],
    ),
    Stated(
        "performance",
        f"In a loop they take {N}, {N} and {N} times at 20, 50 and 100 Mbit/s, and {N}% is missing",
        lambda: [
            *of_limit(8),
            at("performance#slow-links", "8", "100", "0%", "8 MiB", "missing"),
        ],
    ),
    Stated(
        "README",
        f"every other rank raises an error that names it, usually within {N} s",
        lambda: [noticed()],
    ),
    Stated(
        "failures",
        rf"noticed by its broken connection, in \[some {N} s\]",
        lambda: [noticed()],
    ),
    Stated(
        "start",
        f"ends within {N}% of gloo. `sharded` uses .*? ends {N}% better",
        lambda: [
            max(map(abs, [*bounded("change of perplexity"), worse(BOUNDED)])),
            -worse(SHARDED),
        ],
    ),
    Stated(
        "performance",
        f"all-reduce of 4 KiB to 100 MiB .*? {N} to {N} times gloo's speed, for {N} to {N} of",
        lambda: [*hosts(COMPARED, "all_reduce"), *hosts("of gloo's", "all_reduce")],
    ),
    Stated(
        "performance",
        rf"other collectives, 4 KiB to 100 MiB \| {N} to {N} times, broadcasts {N} to {N} times",
        lambda: [*hosts(COMPARED, "reduce_scatter", "all_gather"), *hosts(COMPARED, "broadcast")],
    ),
    Stated(
        "performance",
        rf"nothing lost, all-reduce of 1 MiB and more \| {N} to {N} times",
        lambda: clean("all_reduce"),
    ),
    Stated(
        "performance",
        rf"clean links of 20 to 100 Mbit/s, 20 ms, 2 to 8 hosts \| {N} to {N} times",
        lambda: slow((2, SLOW), (4, SLOW), (8, SLOW)),
    ),
    Stated(
        "performance",
        rf"clean links of 1 Gbit/s, 20 ms, 4 hosts \| {N} to {N} times",
        lambda: slow((4, FAST)),
    ),
    Stated(
        "performance",
        rf"\| two sites of two hosts of two ranks, .*? \| {N} ms; gloo {N} ms with bbr",
        lambda: [site("auto"), site("gloo-bbr")],
    ),
    Stated(
        "performance",
        rf"\| two hosts, 1 Gbit/s, 20 ms, .*? \| {N} ms; gloo {N} ms with bbr, {N} s with cubic",
        lambda: [
            wire(f"{NEAR}, 25 MiB", "lossy"),
            wire(f"{NEAR}, 25 MiB", "gloo, bbr"),
            wire(f"{NEAR}, 25 MiB", "gloo") / 1000,
        ],
    ),
    Stated(
        "performance",
        rf"at 20 ms without loss, {N}: .*? Four hosts at 1 Gbit/s \({N} and {N}\) and two at 10 "
        rf"Gbit/s \({N} and {N}\) miss it",
        lambda: [
            wire(f"{HOSTS}, 20 ms, 0.0%, 4 MiB", LIMIT),
            *reversed(wires(LIMIT, "4 hosts, 1000 Mbit/s, 20 ms, 1.0%")),
            *wires(LIMIT, "2 hosts, 10000 Mbit/s, 20 ms, 1.0%"),
        ],
    ),
    Stated(
        "performance",
        rf"lossy is {N} and {N} times as fast at 1% and 20 ms .*? and {N} and {N} times at 80 ms "
        rf".*? it is {N} to {N} times as fast\. At 5% and 20 ms it is {N} and {N} times as fast, "
        rf"at 10 Gbit/s {N} and {N} times\. \*Reliable\* delivery is {N} and {N} times as fast "
        rf"at 20 ms, and {N} and {N} times at 80 ms",
        lambda: [
            *wires(FASTER, NEAR, FAR),
            *cubic(),
            *wires(FASTER, f"{HOSTS}, 20 ms, 5.0%", "2 hosts, 10000 Mbit/s, 20 ms, 1.0%"),
            *wires(RELIABLE, NEAR, FAR),
        ],
    ),
    Stated(
        "performance",
        f"all-reduce of two hosts at 1 Gbit/s takes {N} to {N} times the median",
        lambda: span(
            number(row["longest / median"])
            for row in rows("performance#wire")
            if re.match(rf"{HOSTS}, .*%(?: in 8)?, (?:4|25) MiB", row["network"])
        ),
    ),
    Stated(
        "performance",
        rf"takes {N} of the limit\. Eight .*? is reached, with {N} times, but not if nothing may "
        rf"be missing \({N} times\)\. .*? Of what the ranks need, {N}% is missing",
        lambda: [
            site("hierarchical", "of it"),
            site("transpose") / site("hierarchical"),
            site("reliable-transpose") / site("reliable-hierarchical"),
            site("hierarchical", "missing"),
        ],
    ),
    Stated(
        "performance",
        f"DriftBound takes {N}, {N}, {N} and {N} times as long as plain lossy, ShardedOptimizer "
        f"{N}, {N}, {N} and {N} times",
        lambda: [*slower("DriftBound"), *slower("ShardedOptimizer")],
    ),
    Stated(
        "performance",
        rf"four times in `cross-dc` \({N} and {N}\)\. They miss it in `transatlantic` \({N} and "
        rf"{N}, plain lossy {N}\)\. .*? methods are {N} and {N} times as fast as gloo, and between "
        f"two sites {N} times",
        lambda: [
            *speed("cross-dc", *BOTH),
            *speed("transatlantic", *BOTH, "lossy"),
            *speed("home", *BOTH),
            *speed("two-sites", BOTH[0]),
        ],
    ),
    Stated(
        "performance",
        f"int8 reaches the loss in {N} s and int4 in {N} s, rather than in {N} s: {N} and {N} "
        rf"times as fast as gloo\. DriftBound with int8 takes {N} s\. .*? int8 {N}, int4 {N}\.",
        lambda: [
            *(target("home", of) for of in ("lossy, int8", "lossy, int4", "lossy")),
            *speed("home", "lossy, int8", "lossy, int4"),
            target("home", "lossy, DriftBound, int8"),
            *(
                at("performance#time-to-target", "home", f"lossy, {of}", "MiB")
                for of in ("int8", "int4")
            ),
        ],
    ),
    Stated(
        "swarms",
        f'a round takes {N} s, and {N} s with `wire="int8"`, which sends {N} of the bytes; - a '
        f"newcomer trains after {N} to {N} s",
        lambda: [
            at(SWARM, FAULTS, "round, s: median, longest"),
            at(SWARM, INT8, "round, s: median, longest"),
            at(SWARM, INT8, "MiB of all") / at(SWARM, FAULTS, "MiB of all"),
            at(SWARM, INT8, "newcomers trained after, s"),
            at(SWARM, FAULTS, "newcomers trained after, s", n=1),
        ],
    ),
    Stated(
        "swarms",
        f"the loss is at most {N}% higher than without",
        lambda: [at(SWARM, FAULTS, "against `moshpit`: mean (least, most)", n=2)],
    ),
    Stated(
        "swarms",
        f"gloo with restarts from checkpoints reached it with one of three seeds, in {N} times the",
        lambda: [
            at("moshpit#swarm-preempted", "gloo, restarts", "times as long as `lossycoll`", n=2)
        ],
    ),
    Stated(
        "cuda",
        f"It takes {N} times as long with 25 MiB, and {N} times with 4 KiB",
        lambda: [at("gpu#gpu-all-reduce", size, "ratio") for size in ("26,214,400", "4,096")],
    ),
    Stated(
        "wire",
        rf"is \[{N} times as fast\].{{0,60}} in int8 .*?int4 is {N} times",
        lambda: [at("performance#wires", of, "times float32's speed") for of in ("int8", "int4")],
    ),
    Stated(
        "wire",
        rf"int8 \({N} of the bytes\) and int4 with feedback \({N}\)",
        lambda: [
            at("quality#wires", f"wire/sharded/{of}", "bytes at 0%")
            for of in ("int8", "int4/feedback")
        ],
    ),
    Stated(
        "measured-costs",
        f"25 MiB are {N} times as fast with int4",
        lambda: [at("performance#wires", "int4", "times float32's speed")],
    ),
    Stated(
        "measured-costs",
        f"comes {N} times sooner with int4",
        lambda: [at("measured-costs#inference", "int4, groups of 32", "sooner")],
    ),
    Stated(
        "flash",
        rf"comes \[{N} times sooner\]",
        lambda: [at("measured-costs#inference", "int4, groups of 32", "sooner")],
    ),
    Stated(
        "try",
        f"ends {N}% worse in perplexity with 1% of packets lost, and {N}% worse with 5%. "
        f"DriftBound and ShardedOptimizer end {N} to {N}% worse, for {N} to {N}% more bytes",
        lambda: [
            *(lost(share, "DDP", "change of perplexity") for share in ("1%", "5%")),
            *tried("change of perplexity"),
            *tried("more bytes than DDP"),
        ],
    ),
    Stated(
        "sealing",
        f"a sealed all-reduce of 25 MiB had {N} of the speed of one in clear with OpenSSL "
        rf"(\d+\.\d+)\.\d+, and {N} with (\d+\.\d+)\.",
        lambda: [
            sealed("sealed", "loopback"),
            openssl("sealed"),
            sealed("sealed-newer", "loopback"),
            openssl("sealed-newer"),
        ],
    ),
    Stated(
        "sealing",
        f"a sealed all-reduce of 25 MiB has {N} of the speed of one in clear, and one of 4 KiB has "
        rf"{N}\. At 10 Gbit/s it has {N} for 25 MiB, and over loopback {N}:",
        lambda: [
            sealed("sealed", "1 Gbit/s"),
            sealed("sealed", "1 Gbit/s", "4 KiB"),
            sealed("sealed", "10 Gbit/s"),
            sealed("sealed", "loopback"),
        ],
    ),
    Stated(
        "simulate",
        f"A message takes the coordinator {N} us of a processor, and a connection {N} ms, {N} KB",
        lambda: list(
            map(simulated, ("us of a message", "ms of a connection", "KB of a connection"))
        ),
    ),
    Stated(
        "status-reference",
        rf"The \[measured cost\]\S* is {N}% of a step",
        lambda: [at("measured-costs#status-step", "status page", "added to a step")],
    ),
    Stated(
        "parity",
        rf"One core encodes \[{N} GB/s\]\S* at m = 4 with AVX-512 and GFNI, {N} GB/s with `plain`",
        lambda: [
            at("parity-speed#parity-speed", of, "encode", "m = 4") for of in ("gfni512", "plain")
        ],
    ),
    Stated(
        "control",
        rf"The \[measured cost\]\S* of 256 members is {N} cores",
        lambda: [at("measured-costs#control-plane", "256", "1", "cores")],
    ),
)


def flat_limit() -> float:
    """Milliseconds of a flat exchange's own bytes at the gateway: four times the least, and the
    delays."""
    delays = 2 * 20
    return 4 * (site("auto", "limit") - delays) + delays


@pytest.mark.parametrize("one", STATED, ids=lambda one: f"{one.page}: {one.words[:50]}")
def test_stated_figures_are_those_of_the_tables(one: Stated) -> None:
    found = re.search(one.words, text(one.page))
    assert found is not None, f"{one.page} doesn't say: {one.words}"
    exact = one.figures()
    assert len(found.groups()) == len(exact)
    wrong = [
        (said, of) for said, of in zip(found.groups(), exact, strict=True) if not agrees(said, of)
    ]
    assert wrong == [], f"{one.page}: {found[0]}"


TYPED = {
    "demo": "one run of 4 ranks and 200 steps",
    "hierarchical": "With 10% lost and hosts of 4, 2 and 2 ranks",
    "shared-memory": "1.75 times slower",
    "troubleshooting": "training with 5% lost packets ends",
    "frameworks": "while 5% of the packets were dropped",
    "try": "has 10% to 40%",
}
"""Sentences that cite a study beside a number that no table has: pages, and words of each."""
FIGURE = re.compile(r"\d(?:%| times| ms| s\b| us\b| GB/s| cores| MB| of the)")


def sentences(page: str) -> Iterator[str]:
    """Those of its paragraphs, and the rows of its tables."""
    folder = ROOT if page == "README" else DOCS
    whole = (folder / f"{page}.md").read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n|\n(?=\||- )", re.sub(r"```.*?```", "", whole, flags=re.DOTALL)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(block.split()))


def uncompared(page: str, studies: Sequence[str]) -> list[str]:
    """Sentences of a page that link to a study and state a figure that :data:`STATED` lacks."""
    whole = text(page)
    of_page = (re.search(one.words, whole) for one in STATED if one.page == page)
    compared = [found.span() for found in of_page if found is not None]
    link = re.compile(rf"\]\((?:docs/)?(?:{'|'.join(studies)})\.md")
    found = []
    for sentence in sentences(page):
        bare = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", sentence)
        first = whole.find(sentence)
        last = first + len(sentence)
        if (
            link.search(sentence)
            and FIGURE.search(bare)
            and not any(begin < last and first < end for begin, end in compared)
            and TYPED.get(page, "\n") not in sentence
        ):
            found.append(sentence)
    return found


def test_figures_that_cite_a_study_are_compared() -> None:
    parts = tree()
    studies = parts.pop("Studies")
    pages = [page for part in parts.values() for page in part if not page.startswith("../")]
    left = {page: uncompared(page, studies) for page in ["README", *pages] if page != "api"}
    assert {page: found for page, found in left.items() if found} == {}


def typed_rows() -> dict[tuple[str, str], dict[str, set[str]]]:
    """Cells of pages' tables by what their row and column are called, with their links taken out.
    Names of one word are too common to be one thing."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        whole = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", whole, re.MULTILINE):
            bare = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", table)
            bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", bare)
            head, _, *body = (
                [c.strip() for c in row.strip("|").split("|")] for row in bare.splitlines()
            )
            for label, *cells in body:
                if len(re.findall(r"[a-z]{2,}", label)) > 2 or label[:1] == "`":
                    for heading, cell in zip(head[1:], cells, strict=False):
                        if re.search(r"\d", cell):
                            found.setdefault((label, heading), {}).setdefault(path.stem, set()).add(
                                cell
                            )
    return found


def test_what_two_pages_say_of_one_thing_is_the_same() -> None:
    several = {name: pages for name, pages in typed_rows().items() if len(pages) > 1}
    assert ("`home`", "network") in several
    different = {
        name: pages for name, pages in several.items() if len(set.union(*pages.values())) > 1
    }
    assert different == {}

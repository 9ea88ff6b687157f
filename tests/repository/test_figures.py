"""Pages state the figures that were measured, all of them the same.

Tables between marks are written by `make reports` of what is kept (all of them:
tests/benchmarks/test_reports.py; here those of which the text is kept). Rows and sentences that are
typed, so that they read well, fail here when the table that they cite changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.common.tables import BEGIN, between, fill_and_keep, kept

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
ANSWERS = PERFORMANCE.partition("## All-reduce against gloo")[0]
DEMO = (DOCS / "demo.md").read_text(encoding="utf-8")


STUDIES = (
    *("arc_topk", "congestion-results", "deadlines", "demo", "demo-theory", "dropcompute", "gpu"),
    *("lab-accuracy", "learnt-sites", "measured-costs", "moshpit", "parity-speed", "performance"),
    *("quality", "simulate", "simulate-accuracy", "theory"),
)
"""Pages whose tables are measured."""
BY_HAND = {
    "| change | result |",
    "| name | stands for | network | source | assumed |",
    "| what | costs |",
    "| stream | chosen |",
    "| task | model | optimizer | steps | evaluated on |",
    "| name | what it does |",
    "| size | parameters | steps, of 8 replicas together | packets |",
    "| kind | time over the limit, at most | missing beyond the network's own loss, at most |",
    "| option | |",
    "| | |",
}
"""Heads of their tables that aren't: settings, goals, examples, and rows that tests compare."""


def differing(docs: Path) -> list[str]:
    """Tables that pages have otherwise than tables.json, or not at all."""
    found = []
    for page, tables in kept(docs).items():
        text = (docs / page).read_text(encoding="utf-8")
        for name, lines in tables.items():
            there = BEGIN.format(name=name) in text
            if not there or between(text, name, "\n".join(lines)) != text:
                found.append(f"{page}: {name}")
    return found


def outside(text: str) -> set[str]:
    """Heads of the tables with figures that stand outside of marks."""
    marks = re.compile(r"<!-- ([^>]+): begin -->.*?<!-- \1: end -->|```.*?```", re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", marks.sub("", text), re.MULTILINE)
    return {table.partition("\n")[0] for table in tables if len(re.findall(r"\d", table)) > 12}


def test_pages_have_the_tables_that_are_kept() -> None:
    assert differing(DOCS) == [], "run make reports"


def test_a_figure_that_differs_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("<!-- x: begin -->\n<!-- x: end -->\n<!-- y: begin -->\n<!-- y: end -->\n")
    for name in "xyz":
        fill_and_keep(page, name, "| a | b |\n| --- | --- |\n| 1 | 12.5 |")
    assert differing(tmp_path) == ["a.md: z"]
    page.write_text(page.read_text().replace("12.5", "12.6", 1))
    assert differing(tmp_path) == ["a.md: x", "a.md: z"]


@pytest.mark.parametrize("name", STUDIES)
def test_measured_tables_stand_between_marks(name: str) -> None:
    assert outside((DOCS / f"{name}.md").read_text(encoding="utf-8")) <= BY_HAND


def test_a_table_outside_of_marks_is_found() -> None:
    table = "| ms |\n|---|\n| 1234567 |\n| 1234567 |\n"
    inside = f"<!-- x: begin -->\n\n{table}\n<!-- x: end -->\n"
    assert outside(f"text\n\n{inside}\n```\n{table}```\n") == set()
    assert outside(f"text\n\n{inside}\n{table}\n") == {"| ms |"}


def marked(name: str, text: str = PERFORMANCE) -> str:
    """What stands between the marks of a table, which is of performance.md unless said."""
    text = text.partition(f"<!-- {name}: begin -->")[2]
    assert text, name
    return text.partition(f"<!-- {name}: end -->")[0]


def cells(table: str, *first: str) -> list[str]:
    """The only row of a table whose first cells are these."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    (found,) = (row for row in rows if row[: len(first)] == list(first))
    return found


def only(text: str, beginning: str) -> list[str]:
    """The cells of the only row of a page that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def seconds(milliseconds: str) -> str:
    return f"{int(milliseconds) / 1000:.1f} s"


@pytest.mark.parametrize(
    ("size", "row"),
    [(25 << 20, "speed of an all-reduce of 25 MiB"), (4 << 10, "speed of an all-reduce of 4 KiB")],
)
def test_speed_on_one_host(size: int, row: str) -> None:
    rows = json.loads((DOCS / "one-host.json").read_text())["rows"]
    speeds = {
        entry["ranks"]: entry["gloo_us"] / entry["lossy_us"]
        for entry in rows
        if entry["collective"] == "all_reduce" and entry["bytes"] == size
    }
    assert only(README, row)[1:] == ["1", f"{speeds[2]:.1f}, {speeds[4]:.1f}"]


def test_two_hosts_over_a_bad_wire() -> None:
    near = cells(marked("wire"), "2 hosts, 1000 Mbit/s, 20 ms, 1.0%, 25 MiB")
    lossy, cubic, bbr = near[2], near[8], near[9]
    gloo, ours = only(README, "25 MiB between two hosts, 1 Gbit/s, 20 ms, 1% lost")[1:]
    assert gloo == f"{bbr} ms (TCP bbr), {seconds(cubic)} (cubic)"
    assert ours == f"{lossy} ms"
    answer = only(ANSWERS, "two hosts, 1 Gbit/s, 20 ms, 1% lost")[1]
    assert answer.startswith(f"{lossy} ms; gloo {bbr} ms with bbr, {seconds(cubic)} with cubic ")

    far = cells(marked("wire"), "2 hosts, 1000 Mbit/s, 80 ms, 1.0%, 25 MiB")
    assert only(README, "the same, 80 ms")[1:] == [f"{far[9]} ms (bbr)", f"{far[2]} ms"]


def test_two_sites() -> None:
    lossy, gloo = (cells(marked("sites"), variant)[2] for variant in ("auto", "gloo-bbr"))
    row = only(README, "25 MiB between two sites of two hosts of two ranks")
    assert row[1:] == [f"{gloo} ms (bbr)", f"{lossy} ms"]
    answer = only(ANSWERS, "two sites of two hosts of two ranks")[1]
    assert answer.startswith(f"{lossy} ms; gloo {gloo} ms with bbr ")


@pytest.mark.parametrize("network", ["cross-dc", "home"])
def test_seconds_to_a_loss_with_drift_bound(network: str) -> None:
    table = marked("time-to-target")
    bounded = cells(table, network, "lossy, DriftBound")[3]
    gloo = min(float(cells(table, network, f"gloo, {tcp}")[3]) for tcp in ("cubic", "bbr"))
    said = re.search(rf"([\d.]+) s on\s+`{network}`\s+\(gloo ([\d.]+) s\)", README)
    assert said is not None
    assert said.groups() == (bounded, f"{gloo:.1f}")


def test_perplexities_of_the_demo() -> None:
    table = cells(DEMO, "perplexity per byte (rank 0)")[1:]
    gloo, clean, lossy, bounded, sharded = table
    assert only(README, "perplexity of the demo's GPT, no loss")[1:] == [gloo, clean]
    rows = {
        "with 10% of packets": lossy,
        "10% dropped, parity": bounded,
        "the same, Shard": sharded,
    }
    for beginning, value in rows.items():
        (said,) = only(README, beginning)[2:]
        assert said.startswith(f"{value} ("), said
        percent = float(re.search(r"\(([+-][\d.]+)%\)", said)[1])  # type: ignore[index]
        exact = 100 * (float(value) / float(gloo) - 1)
        assert percent == pytest.approx(exact, abs=0.06)


def test_bandwidths_of_clean_wires() -> None:
    verdict = marked("clean-verdict")
    said = re.findall(r"([\d.]+) to\s+([\d.]+) times", README.partition("On clean links of")[0])
    ranges = {
        name: re.search(rf"- {name}: times gloo's bus bandwidth: ([\d.]+) to ([\d.]+),", verdict)
        for name in ("broadcast", "all_reduce")
    }
    assert said == [found.groups() for found in ranges.values() if found is not None]
    assert len(said) == 2


def test_speeds_on_slow_links() -> None:
    """gloo's time over lossy's, in a loop and after computing."""
    table = marked("slow-links")
    ratios: dict[int, list[float]] = {}
    for row in re.findall(r"^\| (\d+) \| (\d+) \| 0% \|(.*)$", table, re.M):
        hosts, mbit = int(row[0]), int(row[1])
        if mbit <= 100:
            times = [float(one) for one in re.findall(r"(\d+) ms", row[2])]
            found = [times[1] / times[0], times[3] / times[2]]
            ratios.setdefault(hosts, []).extend(found)
    few = ratios[2] + ratios[4]
    want = [f"{one:.2f}" for one in (min(few), max(few), min(ratios[8]), max(ratios[8]))]
    said = README.partition("On clean links of")[2].partition("(")[0]
    assert re.findall(r"\d\.\d\d", said) == want
    (line,) = re.findall(r"^\| clean links of 20 to 100 .*$", ANSWERS, re.M)
    every = few + ratios[8]
    assert re.findall(r"\d\.\d\d", line) == [f"{min(every):.2f}", f"{max(every):.2f}"]


def test_what_sealing_costs() -> None:
    page = " ".join((DOCS / "sealing.md").read_text(encoding="utf-8").split())

    def share(mark: str, wire: str, size: str) -> str:
        return cells(marked(mark), wire, size)[5].removesuffix(" of plain")

    own = [share("sealed", *of) for of in (("1 Gbit/s", "25 MiB"), ("1 Gbit/s", "4 KiB"))]
    own += [share("sealed", wire, "25 MiB") for wire in ("10 Gbit/s", "loopback")]
    cost = page.partition("## What it costs")[2]
    assert re.findall(r"\b\d\.\d\d\b", cost) == own
    libraries = [
        (share(mark, "loopback", "25 MiB"), re.search(r"OpenSSL ([\d.]+) ", marked(mark))[1])  # type: ignore[index]
        for mark in ("sealed", "sealed-newer")
    ]
    (old, first), (new, second) = libraries
    assert (
        f"had {old} of the speed of one in clear with OpenSSL {first}, and {new} with {second}"
        in page
    )


def words(name: str) -> str:
    """A page's text without line breaks."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_few_bits_are_as_much_faster_on_all_pages() -> None:
    times = {wire: f"{float(cells(marked('wires'), wire)[5]):.1f}" for wire in ("int8", "int4")}
    said = re.search(
        r"is \[([\d.]+) times as fast\].{0,60} in int8 .*?int4 is ([\d.]+) times", words("wire.md")
    )
    assert said is not None
    assert said.groups() == (times["int8"], times["int4"])
    assert f"25 MiB are {times['int4']} times as fast with int4" in words("measured-costs.md")


def test_the_first_token_comes_as_much_sooner_on_all_pages() -> None:
    costs = (DOCS / "measured-costs.md").read_text(encoding="utf-8")
    table = marked("inference", costs)
    sooner = f"{float(cells(table, 'int4, groups of 32')[5].removesuffix(' x')):.1f}"
    assert f"comes [{sooner} times sooner]" in words("flash.md")
    assert f"comes {sooner} times sooner with int4" in words("measured-costs.md")


def test_what_loss_costs_by_the_page_of_try() -> None:
    quality = (DOCS / "quality.md").read_text(encoding="utf-8")
    table = marked("demo-losses", quality)
    ddp = [cells(table, loss, "DDP")[2] for loss in ("1%", "5%")]
    said = re.search(
        r"ends ([\d.]+)% worse in perplexity with 1% .*? ([\d.]+)% worse with 5%", words("try.md")
    )
    assert said is not None
    assert [f"+{percent}%" for percent in said.groups()] == ddp
    rows = [
        cells(table, loss, method)
        for loss in ("1%", "5%")
        for method in ("DDP with DriftBound", "ShardedOptimizer")
    ]
    worse, more = ([row[of].strip("+%") for row in rows] for of in (2, 3))
    assert (
        f"end {min(worse, key=float)} to {max(worse, key=float)}% worse, for "
        f"{min(more, key=float)} to {max(more, key=float)}% more bytes"
    ) in words("try.md")


def test_what_simulations_charge_is_what_was_measured() -> None:
    from lossycoll.simulate.control import CONNECTION_BYTES, COSTS

    said = (
        f"A message takes the coordinator {1e6 * COSTS.receive:.0f} us of a processor, and a "
        f"connection {1e3 * COSTS.connect:.2f} ms, {CONNECTION_BYTES // 1000} KB and a descriptor"
    )
    assert said in words("simulate.md")


def test_memory_that_ranks_share() -> None:
    """As lay_out in native/link_shm.c computes it: of each peer a ring and buffers, of which the
    budgets of all leave fewer."""
    text = (ROOT / "native" / "link_shm.h").read_text(encoding="utf-8")
    found = re.findall(r"LC_SHM_(\w+) = (\d+)(?: << (\d+))?", text)
    of = {name: int(number) << int(by or 0) for name, number, by in found}
    payload = 65_024
    page = (DOCS / "shared-memory.md").read_text(encoding="utf-8")
    assert f"| payload buffers | {payload:,} each |" in page
    for processes in (2, 4, 8):
        peers = processes - 1
        entries = of["ENTRIES"]
        while entries * peers * of["ENTRY_BYTES"] > of["ENTRIES_BUDGET"]:
            entries //= 2
        buffers = min(of["BUDGET"] // payload // peers, of["BUFFERS"])
        ring = 64 + entries * of["ENTRY_BYTES"]
        bytes_ = of["HEADER_BYTES"] + peers * (ring + buffers * payload)
        assert only(page, f"{processes} |")[1] == f"{bytes_ / 2**20:.1f} MiB"

"""README.md, sealing.md and the short answers of performance.md state the figures of the generated
tables.

Tables between marks are written by `make reports` (tests/benchmarks/test_reports.py). These rows
and sentences are typed, so that they read well, and fail here when a study's result changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
ANSWERS = PERFORMANCE.partition("## All-reduce against gloo")[0]
DEMO = (DOCS / "demo.md").read_text(encoding="utf-8")


def marked(name: str) -> str:
    """What stands between the marks of a table of performance.md."""
    text = PERFORMANCE.partition(f"<!-- {name}: begin -->")[2]
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
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    table = page.partition("## Slow links, beside gloo")[2].partition("\n## ")[0]
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
    (line,) = re.findall(r"^\| clean links of 20 to 100 .*$", page, re.M)
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

"""Measured tables of pages are those that are kept.

Tables between marks are written by `make reports` of what is kept (all of them:
tests/benchmarks/test_reports.py; here those of which the text is kept). Sentences and typed rows:
test_stated_figures.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.common.tables import BEGIN, between, fill_and_keep, kept

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

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


def only(text: str, beginning: str) -> list[str]:
    """The cells of the only row of a page that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


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

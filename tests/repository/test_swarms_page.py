"""The script of docs/swarms.md, as two peers run it, and the figures that the page repeats."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support import pages
from tests.support.harness import free_port, warm_python

PAGE, SCRIPT = "swarms.md", "train_swarm.py"


def test_two_peers_train_by_the_guides_script(tmp_path: Path) -> None:
    (text,) = (text for _, text in pages.blocks(PAGE) if text.startswith(f"# {SCRIPT}"))
    first = "    optimizer.catch_up()"
    assert first in text
    text = text.replace(first, f"    swarm.wait_for(2, timeout=90)\n{first}")
    (tmp_path / SCRIPT).write_text(text.replace("20_000", "8_000"))
    place = f"127.0.0.1:{free_port()}"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    environ |= {"OMP_NUM_THREADS": "1", "LOSSYCOLL_SECRET": "0123456789abcdef"}
    peers = [
        subprocess.Popen(
            [warm_python(), SCRIPT],
            cwd=tmp_path,
            env=environ | where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for where in ({"LISTEN": place}, {"JOIN": place})
    ]
    said = [peer.communicate(timeout=100)[0] for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0], said
    assert all(re.search(r"round \d+: 2 peers $", text, re.MULTILINE) for text in said), said


def test_figures_are_those_of_the_study() -> None:
    guide = (pages.DOCS / PAGE).read_text(encoding="utf-8")
    study = (pages.DOCS / "moshpit.md").read_text(encoding="utf-8")
    rows = {
        row[0]: row
        for line in study.splitlines()
        if line.startswith("| moshpit")
        for row in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    faults, few_bits = rows["moshpit, faults"], rows["moshpit, int8, faults"]
    median, fewer = (float(row[8].split(",")[0]) for row in (faults, few_bits))
    assert f"a round takes {median:.1f} s, and {fewer:.1f} s with" in guide
    first, last = (round(float(text)) for text in faults[9].split(" to "))
    assert f"a newcomer trains after {first} to {last} s" in guide
    assert 3.5 < float(faults[11]) / float(few_bits[11]) < 4.5, "about a quarter of the bytes"
    assert "`moshpit, faults` ends within 1% of `moshpit` for 3 of 3 seeds" in study

"""The script of docs/swarms.md, as two peers run it."""

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

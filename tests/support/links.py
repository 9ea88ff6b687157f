"""The same failure over each link: memory that ranks of a machine share, and UDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

_LINK = "LOSSYCOLL_LINK"

over_each_link = pytest.mark.parametrize(
    "link", ["auto", pytest.param("udp", marks=pytest.mark.long)]
)
"""Ranks of a test share this machine, and so its memory, unless ``link`` is ``"udp"``."""


def over(link: str) -> dict[str, str]:
    """The ranks' environment. :func:`must_use_link` then has something to check."""
    return {_LINK: link}


def mapped_memories() -> int:
    """How many processes' shared memory is mapped here, this one's among them."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len({line.split()[4] for line in maps.splitlines() if "/memfd:lossycoll" in line})


def must_use_link(group: Any = None) -> None:
    """Asserts that ``group`` uses the link that the test has chosen, if it has chosen one.

    For ranks of one machine that have no labels and inject nothing.
    """
    import lossycoll

    link = os.environ.get(_LINK)
    if link is None:
        return
    hosts = lossycoll.topology(group).hosts
    if link == "udp":
        assert hosts == tuple(range(len(hosts))), hosts
        assert mapped_memories() == 0
    else:
        assert hosts == (0,) * len(hosts), hosts
        assert mapped_memories() >= len(hosts)

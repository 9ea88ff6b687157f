"""A swarm on one machine, without torch: all come, average and rest."""

from __future__ import annotations

import pytest

from benchmarks.micro import many_peers


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_peers, "REST_SECONDS", 0.2)
    found = dict(zip(many_peers.HEAD, many_peers.row(3, 0.01, 2), strict=True))
    assert found["peers"] == "3"
    assert found["members"] == "3.0"
    assert found["rounds that failed"] == "0 of 6"
    assert float(found["mean of all kept within"].rstrip("%")) < 0.1
    started, joined, first = (
        float(found[name]) for name in many_peers.HEAD if name.endswith("after, s")
    )
    assert 0 < started <= joined <= first
    own, resident = map(float, found["memory of a peer, MiB: its own, resident"].split(", "))
    assert 0 < own <= resident

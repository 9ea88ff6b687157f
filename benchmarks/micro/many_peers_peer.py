"""A peer of benchmarks.micro.many_peers: an engine, and no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.runtime.keys.secret import secret_of
from lossycoll.runtime.swarm.member import SwarmMember

TIMEOUT: Final = 120.0
OWN: Final = ("Private_Clean", "Private_Dirty")


def memory() -> dict[str, int]:
    """Bytes that are this process's alone, and all that it has in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return {"own": sum(sizes[name] for name in OWN), "rss": sizes["Rss"]}


class Peer:
    """From when it has joined."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._values = np.full(config["values"], float(config["peer"]), np.float32)
        self._member: SwarmMember | None = None

    def join(self) -> dict[str, Any]:
        """Joins; by then others needn't have."""
        self._member = SwarmMember(
            [("127.0.0.1", self._config["port"])],
            name=str(self._config["peer"]),
            secret=secret_of(self._config["secret"]),
            options=Options(link="udp"),  # else they would share memory
            timeout=TIMEOUT,
        )
        self._member.averages(f"{len(self._values):032x}", timeout=TIMEOUT)
        at = time.monotonic()
        self._member.wait_for(self._config["peers"], TIMEOUT)
        return {"at": at}

    def rounds(self, count: int) -> dict[str, Any]:
        """One after another."""
        assert self._member is not None
        begin, reports = time.process_time(), []
        for _ in range(count):
            report = self._member.average(self._values, 1.0, TIMEOUT)
            reports.append(
                {
                    "seconds": report.waited + report.seconds,
                    "members": len(report.members),
                    "contributions": report.contributions,
                    "failed": bool(report.failure),
                }
            )
        cpu = (time.process_time() - begin) / count
        mean = float(self._values.mean())
        return {"at": time.monotonic(), "reports": reports, "cpu": cpu, "mean": mean, **memory()}

    def rest(self, seconds: float) -> dict[str, Any]:
        """CPU time of a second in which nothing happens."""
        begin, at = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return {"cpu": (time.process_time() - begin) / (time.monotonic() - at)}

    def close(self) -> None:
        """Leaves."""
        if self._member is not None:
            self._member.close()


def main() -> int:
    os.environ.setdefault("LOSSYCOLL_LOG", "warning")
    peer = Peer(json.loads(sys.argv[1]))
    print(json.dumps({"at": time.monotonic()}), flush=True)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        print(json.dumps(getattr(peer, what)(*rest)), flush=True)
    assert "torch" not in sys.modules
    peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The process of benchmarks.micro.directory that has the directory."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from lossycoll.runtime.keys.secret import Secret, secret_of
from lossycoll.runtime.swarm.directory import Directory
from lossycoll.runtime.swarm.server import DirectoryServer
from lossycoll.runtime.swarm.valkey_relay import ValkeyRelay
from lossycoll.runtime.swarm.valkey_server import ValkeyUrl


def begun(join: str, secret: Secret | None) -> tuple[int, Directory, Callable[[], None]]:
    """A directory that serves: its port (0: it has none), the peers, and how to end it."""
    if not join:
        server = DirectoryServer("127.0.0.1", 0, secret)
        return server.port, server._directory, server.close
    relay = ValkeyRelay(ValkeyUrl.of(join), secret)
    own = None
    while own is None:  # a newcomer looks again before it begins a swarm
        try:
            own = relay.reach(("127.0.0.1", 0), "")
        except OSError:
            time.sleep(0.1)
    own.close()
    assert relay._directory is not None
    return 0, relay._directory._directory, relay.close


def figures(directory: Directory) -> dict[str, Any]:
    """What the process has taken so far."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    rss = pages * resource.getpagesize()
    taken = {"cpu": time.process_time(), "rss": rss, "at": time.monotonic()}
    return {**taken, "peers": len(directory.peers)}


def main() -> int:
    config = json.loads(sys.argv[1])
    secret = secret_of(config["secret"]) if config["secret"] else None
    port, directory, close = begun(config["join"], secret)
    print(json.dumps({"port": port}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(figures(directory)), flush=True)
    close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

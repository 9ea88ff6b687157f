"""Numbers for thousands of processes: those that nobody has cost no memory."""

from __future__ import annotations

import subprocess
import sys

MEASURES = """
import sys
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import Host

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def opened(number: int, places: int) -> Host:
    host = Host(number, places, "127.0.0.1", payload_bytes=1400, options=Options(link="udp"))
    own = ("127.0.0.1", host.link().port)
    host.start(77, [own if one == number else None for one in range(places)])
    return host

opened(0, 2).close()  # what the first one takes of the process
before = resident()
hosts = [opened(number, int(sys.argv[1])) for number in range(4)]
idle = resident() - before
for process in range(4, 4 + int(sys.argv[2])):
    for host in hosts:
        host.admit(process, ("127.0.0.1", 9))
print(idle // len(hosts), (resident() - before) // len(hosts))
for host in hosts:
    host.close()
"""


def measured(places: int, admitted: int = 0) -> tuple[int, int]:
    """Bytes of a host, without and with processes that were admitted."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, str(places), str(admitted)],
        capture_output=True,
        text=True,
        check=True,
    )
    idle, after = map(int, done.stdout.split())
    return idle, after


def test_places_that_nobody_has_cost_no_memory() -> None:
    """A path that has everything takes some 56 kB: 4,096 of them would be 230 MB."""
    few, _ = measured(128)
    many, after = measured(4096, admitted=16)
    assert many - few < 2 << 20
    assert after - many < 16 * (128 << 10)

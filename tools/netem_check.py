#!/usr/bin/env python3
"""The laboratory's netem backend and tools/netem against real tc netem, in a guest, in minutes.

    python -m tools.netem_check --dry-run      the commands that would run in the guest
    python -m tools.netem_check [--keep FILE]  runs them (make netem), and keeps what came of it

On the host the backend is built over a recorder: what it would run becomes a shell script, line by
line. The guest (netem_guest.py: Debian's kernel in QEMU, root, no KVM) runs that script, and the
laboratory's probe counts packets as ``lossycoll lab verify`` does. Starting Python for each of the
backend's commands is what makes ``verify`` itself too slow in there.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

from lossycoll.lab import Link, Network, Port
from lossycoll.lab.netem import FIRST_CLASS, LINKS, Netem
from lossycoll.lab.network import address_of
from lossycoll.lab.verify import SIGMAS, UDP_BYTES, Flow, LinkCheck

ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = 460
"""The guest is ended then: the whole is to take 8 minutes at most."""
PINGS: Final = 10
PACKETS: Final = 2500
PACKETS_PER_S: Final = 2000
"""A guest without KVM carries some 12,000 when the machine is idle."""
SEGMENTS: Final = 40
IDLE_MS: Final = 3000
DELAY_MS: Final = 10.0
TOOL: Final = Link(loss=0.1, delay_ms=5)
PAIR: Final = (0, 1)


@dataclass(frozen=True)
class Case:
    """One network, and what is measured in it: from host 0 to host 1.

    ``mbit``: offered; 0 for PACKETS_PER_S. ``tool``: what tools/netem adds at host 0.
    """

    name: str
    network: Network
    mbit: float = 0.0
    tool: Link | None = None

    @property
    def link(self) -> Link:
        return self.network.link_of(*PAIR) if self.tool is None else self.tool

    @property
    def round_trip_ms(self) -> float:
        there, back = self.network.link_of(*PAIR), self.network.link_of(*PAIR[::-1])
        added = 0.0 if self.tool is None else self.tool.delay_ms
        return there.delay_ms + back.delay_ms + added

    @property
    def down_mbit(self) -> float | None:
        return self.network.port_of(PAIR[1]).down_mbit


def _links(**fields: Any) -> Network:
    return Network(hosts=2, link=Link(delay_ms=DELAY_MS, **fields))


CASES: Final = (
    Case("no loss", _links()),
    Case("tools/netem at the sender", _links(), tool=TOOL),
    Case("single losses", _links(loss=0.05)),
    Case("bursts of 4", _links(loss=0.05, burst=4)),
    Case("10 Mbit/s", Network(hosts=2, port=Port(down_mbit=10, queue_ms=50)), mbit=20),
)


class Recorder(Netem):
    """The backend, with its commands written down as a script instead of run."""

    def __init__(self, network: Network) -> None:
        # Not the parents': they start a process that holds namespaces.
        self.network = network
        self.lines: list[str] = []
        for host in range(network.total_hosts + 1):
            self.lines += [f"ip netns add {_name(host)}", f"ip -n {_name(host)} link set lo up"]
        self._build()
        self.prepare()
        self.apply(network)

    def tool(self, number: int, *command: str, text: str | None = None) -> str:
        line = f"ip netns exec {_name(number)} {shlex.join(command)}"
        if text is not None:
            line += f" <<'END'\n{text.strip()}\nEND"
        self.lines.append(line)
        return ""

    @property
    def middle_path(self) -> str:
        return _name(self.middle)

    def _await_up(self, number: int, devices: set[str]) -> None:
        for device in sorted(devices):
            shown = f"ip -n {_name(number)} -o link show {device}"
            self.lines.append(f"until {shown} | grep -q 'state UP'; do sleep 0.1; done")

    def close(self) -> None:
        pass


def _name(number: int) -> str:
    return f"n{number}"


def script(python: str = sys.executable) -> str:
    """What runs in the guest. Results go to /mnt/out, a file each: RESULT.CASE."""
    backend = Recorder(CASES[0].network)
    lines = ["set -e", *_told(backend.lines)]
    for number, case in enumerate(CASES):
        backend.lines.clear()
        if number and case.network != backend.network:
            backend.change(case.network)
        lines += ["", f"echo '== {case.name}'", *_told(backend.lines)]
        tool = f"ip netns exec {_name(PAIR[0])} {shlex.quote(python)} -m tools.netem"
        if case.tool is not None:
            wanted = f"--loss {case.tool.loss:g} --delay-ms {case.tool.delay_ms:g}"
            lines += _told([f"{tool} apply eth0 {wanted} --yes", f"{tool} show eth0"])
        lines += _measured(number, case)
        if case.tool is not None:
            lines += _told([f"{tool} clear eth0 --yes"])
            shown = f"ip netns exec {_name(PAIR[0])} tc qdisc show dev eth0"
            lines += [*_told([shown]), f"{shown} > /mnt/out/cleared.{number}"]
    return "\n".join(lines) + "\n"


def _told(lines: Sequence[str]) -> list[str]:
    """Each line said before it is run, without set -x, which hides quotes and documents."""
    return [part for line in lines for part in (f"cat <<'SAID'\n+ {line}\nSAID", line)]


def _measured(number: int, case: Case) -> list[str]:
    between = f"{_name(PAIR[0])} {_name(PAIR[1])} {address_of(PAIR[1])}"
    payload = case.network.mtu - UDP_BYTES
    rate = case.mbit * 125_000 if case.mbit else PACKETS_PER_S * payload
    probe = "/mnt/out/probe"
    lines = [f"{probe} ping {between} {PINGS} > /mnt/out/ping.{number}"]
    for name, segments in (("plain", 1), ("aggregated", SEGMENTS)):
        flow = f"{probe} flow {between} {PACKETS} {payload} {segments} {rate:g} {IDLE_MS}"
        counters = f"ip netns exec {_name(PAIR[1])} tc -s -j qdisc show dev {LINKS}"
        lines += [
            f"{flow} > /mnt/out/{name}.{number}",
            f"{counters} > /mnt/out/{name}-links.{number}",
        ]
    return lines


@dataclass
class Result:
    """What the guest found in one case. ``dropped``: by the link's netem, as it counts itself, in
    all and then; None where tools/netem did it."""

    case: Case
    round_trips: list[float]
    flows: dict[str, Flow]
    dropped: dict[str, int] = field(default_factory=dict)
    cleared: str | None = None

    @property
    def row(self) -> LinkCheck:
        times = sorted(self.round_trips)
        middle = times[len(times) // 2] if times else math.inf
        link, asked = self.case.link, self.case.round_trip_ms
        return LinkCheck(
            PAIR, link, asked, 0.0, middle, self.flows["plain"], self.flows["aggregated"]
        )

    @property
    def complaints(self) -> list[str]:
        out = [] if self.round_trips else ["no ping came back"]
        if self.case.down_mbit is None:
            out += self.row.complaints
        else:
            # A slow guest may carry less, never more.
            for name, one in self.flows.items():
                if not one.lost or one.mbit > 1.05 * self.case.down_mbit:
                    out.append(
                        f"{name}: {one.mbit:.1f} Mbit/s and {one.lost} lost; wanted "
                        f"{self.case.down_mbit:g} at most, and the rest lost"
                    )
        for name, one in self.flows.items():
            low, high = burst_bounds(self.case.link.burst, one.bursts)
            if self.case.link.burst > 1 and not low <= one.burst <= high:
                out.append(f"{name}: mean burst {one.burst:.2f}, wanted {low:.2f} to {high:.2f}")
            counted = self.dropped.get(name)
            if counted is not None and counted != one.lost:
                out.append(f"{name}: {one.lost} didn't arrive, netem counts {counted} as dropped")
        if self.cleared is not None and ("netem" in self.cleared or "tbf" in self.cleared):
            out.append(f"tools/netem clear left something: {self.cleared.strip()}")
        return [f"{self.case.name}: {text}" for text in out]


def burst_bounds(burst: float, count: int) -> tuple[float, float]:
    """Between what the mean of ``count`` runs should be, of lengths with geometric chances."""
    slack = SIGMAS * math.sqrt(burst * (burst - 1) / max(1, count))
    return max(1.0, burst - slack), burst + slack


def results(found: Mapping[str, str]) -> list[Result]:
    """What the files say that :func:`script` has made, by name. KeyError if one is missing."""
    out = []
    for number, case in enumerate(CASES):
        flows = {
            name: Flow(**json.loads(found[f"{name}.{number}"])) for name in ("plain", "aggregated")
        }
        result = Result(case, json.loads(found[f"ping.{number}"])["ms"], flows)
        if case.tool is None and case.down_mbit is None:
            before = None
            for name in flows:
                now = _drops(json.loads(found[f"{name}-links.{number}"]))
                # Pings came before the first flow, and may have been lost as well.
                if before is not None:
                    result.dropped[name] = now - before
                before = now
        result.cleared = found[f"cleared.{number}"] if case.tool is not None else None
        out.append(result)
    return out


def _drops(queues: Sequence[Mapping[str, Any]]) -> int:
    """Of the link from host 0."""
    wanted = f"{FIRST_CLASS + PAIR[0]:x}:"
    (drops,) = [queue["drops"] for queue in queues if queue["handle"] == wanted]
    return int(drops)


def table(found: Sequence[Result]) -> str:
    head = ("network", "sent as", "loss asked", "got", "burst", "RTT asked, ms", "got", "Mbit/s")
    lines = ["{:<27}{:<12}{:>10}{:>9}{:>7}{:>15}{:>9}{:>9}".format(*head)]
    for result in found:
        row = result.row
        for name, one in result.flows.items():
            asked = "queue" if result.case.down_mbit else f"{row.link.loss:.1%}"
            lines.append(
                f"{result.case.name:<27}{name:<12}{asked:>10}{one.loss:>9.2%}{one.burst:>7.2f}"
                f"{row.round_trip_asked:>15.1f}{row.round_trip:>9.2f}{one.mbit:>9.2f}"
            )
    return "\n".join(lines)


def build_probe(to: Path) -> None:
    sources = [str(ROOT / "tools" / "netem_probe.c"), str(ROOT / "native" / "lab" / "probe.c")]
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-static")
    subprocess.run(["cc", *flags, "-o", str(to), *sources], check=True, timeout=60)


def main(arguments: Sequence[str] | None = None) -> int:
    from tools import netem_guest

    about = (__doc__ or "").splitlines()[0]
    parser = netem_guest.parser_of_check("python -m tools.netem_check", about, SECONDS)
    chosen = parser.parse_args(arguments)
    if chosen.dry_run:
        print(script(), end="")
        return 0
    lacking = netem_guest.lacking({**netem_guest.LABORATORY, "cc": "gcc"})
    if lacking:
        netem_guest.say(lacking)
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        out.mkdir()
        build_probe(out / "probe")
        version, status = netem_guest.run(script(), chosen.cache, Path(place), chosen.seconds)
        found = {path.name: path.read_text() for path in out.iterdir() if path.name != "probe"}
    said = found.get("log", "")
    print(said, end="")
    if status:
        netem_guest.say(
            f"the script ended with status {status} after {time.monotonic() - begin:.0f} s"
        )
        return 1
    measured = results(found)
    complaints = [text for result in measured for text in result.complaints]
    verdict = "\n".join(complaints) if complaints else "all as asked"
    text = (
        f"python -m tools.netem_check, {date.today().isoformat()}, Linux {version} in QEMU "
        f"without KVM, {time.monotonic() - begin:.0f} s\n\n{table(measured)}\n\n{verdict}\n"
    )
    print(text)
    if chosen.keep:
        chosen.keep.write_text(f"{text}\nWhat ran in the guest, and what it said:\n\n{said}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

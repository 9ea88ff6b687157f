"""How much the laboratory's switch carries, and how exactly it does what it is asked.

``python -m benchmarks.micro.lab`` prints the tables of docs/lab-accuracy.md. Rates are of
payload, with the sender, the receiver and the switch on the same cores; each is the median of some
runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks.common.tables import Table, add_report
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.verify import SEGMENTS, flow, round_trips, verify

PAGE = "lab-accuracy.md"
ASKED = Table(
    PAGE,
    "lab-asked",
    "asked: loss, mean burst, round trip | loss of datagrams / aggregates | mean burst"
    " | round trip",
)
PORTS = Table(PAGE, "lab-ports", "port | offered | got | dropped | longest queue")
LINKS = {
    "no delay": Link(),
    "20 ms": Link(delay_ms=10),
    "20 ms, 1% lost": Link(delay_ms=10, loss=0.01),
}
TRAFFIC = Table(PAGE, "lab-traffic", " | ".join(["traffic, Mbit/s of payload", *LINKS]))
STREAM = """
import socket, sys, time
role, address, congestion, seconds = sys.argv[1:]
def shaped(s):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    return s
if role == "receive":
    with socket.create_server(("", 7001)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
        room, total, start = bytearray(1 << 20), 0, time.monotonic()
        while n := peer.recv_into(room):
            total += n
        print(total / (time.monotonic() - start))
else:
    with shaped(socket.socket()) as s:
        s.connect((address, 7001))
        end, data = time.monotonic() + float(seconds), bytes(1 << 20)
        while time.monotonic() < end:
            s.sendall(data)
"""


def stream(lab: Lab, congestion: str, seconds: float) -> float:
    """Mbit/s of one TCP stream from host 0 to host 1."""

    def end(role: str) -> list[str]:
        return [sys.executable, "-S", "-c", STREAM, role, lab.address(1), congestion, str(seconds)]

    with lab.start(1, end("receive"), stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        lab.start(0, end("send")).wait()
        return float(receiver.stdout.readline()) * 8e-6


def throughput(rounds: int, seconds: float) -> list[list[str]]:
    """Rows of TRAFFIC: medians."""

    def datagrams(segments: int, mbit: float) -> Callable[[Lab], float]:
        packets = int(mbit * 125_000 * seconds / 1472)
        return lambda lab: flow(lab, (0, 1), packets=packets, mbit=mbit, segments=segments).mbit

    kinds: dict[str, Callable[[Lab], float]] = {
        "datagrams, 800 Mbit/s offered": datagrams(1, 800),
        "aggregates, 2000 offered": datagrams(SEGMENTS, 2000),
        "aggregates, 4000 offered": datagrams(SEGMENTS, 4000),
        "TCP, cubic": lambda lab: stream(lab, "cubic", seconds),
        "TCP, bbr": lambda lab: stream(lab, "bbr", seconds),
    }
    rows = []
    for kind, measure in kinds.items():
        cells = []
        for link in LINKS.values():
            rates, unasked = [], 0
            for _ in range(rounds):
                with Lab(Network(link=link)) as lab:
                    try:
                        rates.append(measure(lab))
                    except ValueError:
                        continue  # this kernel lacks that congestion control
                    unasked += sum(host.unasked for host in lab.counters().hosts)
            lost = f" ({unasked} lost unasked)" if unasked else ""
            cells.append(f"{statistics.median(rates):.0f}{lost}" if rates else "-")
        rows.append([kind, *cells])
    return rows


def exactness() -> list[list[str]]:
    """Rows of ASKED."""
    rows = []
    for link in (
        Link(loss=0.001),
        Link(loss=0.01),
        Link(loss=0.05),
        Link(loss=0.01, burst=4),
        Link(loss=0.05, burst=8),
        Link(delay_ms=10),
        Link(delay_ms=40, jitter_ms=5),
    ):
        with Lab(Network(link=link)) as lab:
            (row,) = verify(lab, [(0, 1)])
        kinds = (row.plain, row.aggregated)
        asked = f"{100 * link.loss:g}%, {link.mean_burst:.2f}, {row.round_trip_asked:g} ms"
        rows.append(
            [
                asked + (f", jitter of 2 x {link.jitter_ms:g} ms" if link.jitter_ms else ""),
                " / ".join(f"{one.loss:.3%}" for one in kinds),
                " / ".join(f"{one.burst:.2f}" if one.lost else "-" for one in kinds),
                f"{row.round_trip:.2f} ms",
            ]
        )
    return rows


def shares() -> list[list[str]]:
    """Rows of PORTS."""
    rows = []
    for mbit, queue_ms in ((10, 100), (100, 20), (1000, 10)):
        with Lab(Network(port=Port(up_mbit=mbit, queue_ms=queue_ms))) as lab:
            packets = mbit * 400
            one = flow(lab, (0, 1), packets=packets, mbit=1.5 * mbit, segments=SEGMENTS)
            up = lab.counters().hosts[0].up
        rows.append(
            [
                f"{mbit} Mbit/s, queue {queue_ms} ms",
                f"{1.5 * mbit:g} Mbit/s",
                f"{one.mbit:.1f} Mbit/s",
                f"{one.queued_out:,} of {packets:,}",
                f"{up.queue_max:,} of {mbit * queue_ms * 125:,} bytes",
            ]
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="per figure (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="per run (%(default)g)")
    add_report(parser, PAGE)
    chosen = parser.parse_args()
    print(ASKED.report(chosen.report, exactness()), "\n")
    print(PORTS.report(chosen.report, shares()), "\n")
    print(TRAFFIC.report(chosen.report, throughput(chosen.rounds, chosen.seconds)), "\n")
    with Lab() as lab:
        times = round_trips(lab, (0, 1), 200)
    median = statistics.median(times)
    print(f"round trip without delay: median {median:.3f} ms, least {min(times):.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

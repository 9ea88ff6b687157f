"""How much the laboratory's switch carries, and how exactly it does what it is asked.

``python -m benchmarks.micro.lab`` prints tables of docs/lab.md. Rates are of payload, with the
sender, the receiver and the switch on the same cores; each is the median of some runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.verify import SEGMENTS, flow, round_trips, verify

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


def throughput(rounds: int, seconds: float) -> Table:
    table = Table("link", "traffic", "Mbit/s", "lost unasked")
    links = {
        "no delay": Link(),
        "20 ms there and back": Link(delay_ms=10),
        "the same, 1% lost": Link(delay_ms=10, loss=0.01),
    }

    def datagrams(segments: int, mbit: float) -> Callable[[Lab], float]:
        packets = int(mbit * 125_000 * seconds / 1472)
        return lambda lab: flow(lab, (0, 1), packets=packets, mbit=mbit, segments=segments).mbit

    kinds: dict[str, Callable[[Lab], float]] = {
        "datagrams, 800 Mbit/s offered": datagrams(1, 800),
        "aggregates, 2000 Mbit/s offered": datagrams(SEGMENTS, 2000),
        "aggregates, 4000 Mbit/s offered": datagrams(SEGMENTS, 4000),
        "TCP, cubic": lambda lab: stream(lab, "cubic", seconds),
        "TCP, bbr": lambda lab: stream(lab, "bbr", seconds),
    }
    for link_name, link in links.items():
        for kind, measure in kinds.items():
            rates, unasked = [], 0
            for _ in range(rounds):
                with Lab(Network(link=link)) as lab:
                    try:
                        rates.append(measure(lab))
                    except ValueError:
                        continue  # this kernel lacks that congestion control
                    unasked += sum(host.unasked for host in lab.counters().hosts)
            if rates:
                table.add_row(link_name, kind, f"{statistics.median(rates):.0f}", str(unasked))
    return table


def exactness() -> Table:
    table = Table(
        *("asked", "sent as", "loss", "mean burst", "round trip, ms"), title="asked against got"
    )
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
        asked = f"{link.loss:.1%}, burst {link.mean_burst:.2f}, {row.round_trip_asked:g} ms"
        for name, one in (("datagrams", row.plain), ("aggregates", row.aggregated)):
            burst = f"{one.burst:.2f}" if one.lost else "-"
            table.add_row(asked, name, f"{one.loss:.3%}", burst, f"{row.round_trip:.2f}")
    return table


def shares() -> Table:
    table = Table("port", "offered", "got, Mbit/s", "dropped", "longest queue, bytes")
    for mbit, queue_ms in ((10, 100), (100, 20), (1000, 10)):
        with Lab(Network(port=Port(up_mbit=mbit, queue_ms=queue_ms))) as lab:
            packets = mbit * 400
            one = flow(lab, (0, 1), packets=packets, mbit=1.5 * mbit, segments=SEGMENTS)
            up = lab.counters().hosts[0].up
        port = f"{mbit} Mbit/s, queue {queue_ms} ms"
        table.add_row(
            port,
            f"{1.5 * mbit:g} Mbit/s",
            f"{one.mbit:.1f}",
            f"{one.queued_out}",
            str(up.queue_max),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="per figure (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="per run (%(default)g)")
    chosen = parser.parse_args()
    console = Console(width=110)
    console.print(exactness())
    console.print(shares())
    console.print(throughput(chosen.rounds, chosen.seconds))
    with Lab() as lab:
        times = round_trips(lab, (0, 1), 200)
    median = statistics.median(times)
    console.print(f"round trip without delay: median {median:.3f} ms, least {min(times):.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

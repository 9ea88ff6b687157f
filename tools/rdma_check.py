#!/usr/bin/env python3
"""The RDMA link between two processes with two soft-RoCE devices, in a guest, in minutes.

    python -m tools.rdma_check --dry-run      the commands that would run in the guest
    python -m tools.rdma_check [--keep FILE]  runs them (make rdma), and keeps what came of it

It needs no RDMA hardware. The guest (netem_guest.py: Debian's kernel in QEMU, root, no KVM) joins
two soft devices by a pair of interfaces, on which netem can lose packets. What is measured there
says rdma_measures.py; here it is judged.
"""

from __future__ import annotations

import ctypes
import json
import math
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

from benchmarks.common.tables import Table, add_report
from tools import netem_guest
from tools.rdma_measures import (
    CUT_FOR_S,
    EXACT,
    LOSS_PACKETS,
    LOSSES,
    SPEED_EACH,
    SPEED_ELEMENTS,
    WAYS,
)
from tools.rdma_pair import ADDRESSES, INTERFACES

CASES: Final = Table("measured-costs.md", "rdma", "case | result")
LINKS: Final = Table(
    "measured-costs.md",
    "rdma-speed",
    "link | MB/s | CPU time of rank 0 for each packet | of rank 1 | of the kernel's threads"
    " | resent",
)
SECONDS: Final = 300
"""The guest is ended then: the whole is to take 3 minutes where the machine is idle."""
MTU: Final = 4200
"""Of the interfaces: datagrams of 4,096 bytes and their headers go in."""
EXTRAS: Final = netem_guest.Extras(
    modules=("crc32_generic", "crc32_pclmul", "rdma_rxe", "ib_uverbs"),
    unpacked=("/drivers/infiniband/core/", "/drivers/infiniband/sw/rxe/", "/udp_tunnel."),
    processors=2,
)
PACKAGES: Final = "ibverbs-providers libibverbs1 iproute2"
PROVIDER: Final = Path("/etc/libibverbs.d/rxe.driver")
SIGMAS: Final = 4.0
LEAST: Final = {"exact": 500, "oracle": 100, "lossy": 30}
"""Fewer operations than these say little, however slow the machine."""
LATE: Final = 1.5
"""By which factor a killed rank may be noticed after the bound: the guest is slow."""


def lacking() -> str:
    """What this machine lacks, as a sentence; empty if it has it all."""
    absent = [name for name in ("ip", "tc", "rdma") if shutil.which(name) is None]
    if not PROVIDER.exists():
        absent.append(f"{PROVIDER}")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        absent.append("libibverbs.so.1")
    if absent:
        return f"it needs {', '.join(absent)}: apt-get install {PACKAGES}"
    return netem_guest.lacking()


def script(python: str = sys.executable) -> str:
    """What runs in the guest. Results go to /mnt/out, a file of JSON each."""
    first, second = INTERFACES
    lines = ["set -ex", f"ip link add {first} mtu {MTU} type veth peer name {second} mtu {MTU}"]
    lines += ["sysctl -qw net.ipv4.conf.all.rp_filter=0"]
    # Both ends have addresses of this machine: each answers for its own alone, and what comes from
    # such an address is no forgery.
    settings = ("accept_local=1", "rp_filter=0", "arp_ignore=1", "arp_announce=2")
    for interface, address in zip(INTERFACES, ADDRESSES, strict=True):
        lines += [f"sysctl -qw net.ipv4.conf.{interface}.{setting}" for setting in settings]
        lines += [f"ip addr add {address}/24 dev {interface}", f"ip link set {interface} up"]
    # UDP between the two would go by the loopback interface: what is sent here looks at tables of
    # its own first, and only what has come at those of local addresses.
    lines += ["ip rule add pref 100 lookup local", "ip rule del pref 0"]
    ends = zip(INTERFACES, ADDRESSES, reversed(ADDRESSES), strict=True)
    for number, (interface, own, other) in enumerate(ends, 10):
        lines += [
            f"ip rule add pref {number} iif lo to {other} lookup {number}",
            f"ip route add {other} dev {interface} src {own} table {number}",
        ]
    for rank, interface in enumerate(INTERFACES):
        lines.append(f"rdma link add rxe{rank} type rxe netdev {interface}")
    lines += ["rdma link show", f"{shlex.quote(python)} -m tools.rdma_measures /mnt/out"]
    return "\n".join(lines) + "\n"


@dataclass
class Verdict:
    """One measure: what came of it, in words, and what is wrong with that."""

    name: str
    said: str
    seconds: float
    complaints: list[str] = field(default_factory=list)


Judge = Callable[[Any], tuple[str, list[str]]]


def verdicts(found: Mapping[str, str]) -> list[Verdict]:
    """What the files say that the guest has made, by name. KeyError if one is missing."""
    judges: dict[str, Judge] = {"exact": _exact, "oracle": _oracle}
    for percent in LOSSES:
        judges |= {f"reliable-{percent}": _reliable, f"lossy-{percent}": _lossy}
    judges |= {"killed": _killed, "speed": _speed, "cut": _cut}
    out = []
    for name, judge in judges.items():
        data = json.loads(found[f"{name}.json"])
        complaints = _broken(data, is_killed=judge is _killed)
        said = "failed"
        if not complaints:
            said, complaints = judge(data)
            if judge is not _cut:  # a queue pair that begins anew drops what comes meanwhile
                complaints += _common(data)
        out.append(Verdict(name, said, data["seconds"], [f"{name}: {text}" for text in complaints]))
    return out


def _broken(data: Any, is_killed: bool) -> list[str]:
    ranks = data["ranks"][:1] if is_killed else data["ranks"]
    return [
        f"rank {rank}: {one['error'].strip().splitlines()[-1]}"
        for rank, one in enumerate(ranks)
        if "error" in one
    ]


def _common(data: Any) -> list[str]:
    """What must hold of every measure."""
    out = []
    for rank, (one, counted) in enumerate(zip(data["ranks"], data["counted"], strict=True)):
        if one.get("torch"):
            out.append(f"rank {rank} has imported torch")
        unread = counted["rcvd_pkts"] - counted["rdma_recvs"]
        stats = one.get("stats")
        # Where a rank is killed, what still comes finds no queue pair.
        if stats and (unread or stats["socket_overflow"]):
            out.append(
                f"rank {rank}'s device dropped {unread} datagrams, and the engine counts "
                f"{stats['socket_overflow']}"
            )
        if stats and counted["sent_pkts"] < stats["packets_sent"]:
            out.append(
                f"rank {rank} sent {stats['packets_sent']} packets, its device only "
                f"{counted['sent_pkts']}"
            )
    return out


def _sum(data: Any, name: str) -> int:
    return sum(one["stats"][name] for one in data["ranks"])


def _failed(data: Any) -> list[str]:
    codes = [one["codes"] for one in data["ranks"]]
    return [] if codes == [[0], [0]] else [f"operations ended with the codes {codes}"]


def _exact(data: Any) -> tuple[str, list[str]]:
    ranks = data["ranks"]
    done, wrong = ranks[0]["operations"], sum(one["wrong"] for one in ranks)
    missing = _sum(data, "packets_missing")
    said = (
        f"{done} of {EXACT} operations in {ranks[0]['loop_seconds']:.1f} s, half of them lossy, of "
        f"{', '.join(map(str, ranks[0]['sizes']))} floats; payload {ranks[0]['payload']}, MTU "
        f"{ranks[0]['mtu']}; {_sum(data, 'packets_sent')} packets, {missing} missing, "
        f"{_sum(data, 'packets_resent')} resent; wrong: {wrong}"
    )
    complaints = _failed(data)
    if wrong or missing:
        complaints.append(f"{wrong} results are wrong, {missing} packets missing")
    if done < LEAST["exact"]:
        complaints.append(f"only {done} operations, wanted {LEAST['exact']} at least")
    return said, complaints


def _oracle(data: Any) -> tuple[str, list[str]]:
    one = data["ranks"][0]
    said = (
        f"{one['operations']} of {one['asked']} operations equal the reference, "
        f"{one['dropped']} packets dropped by injection"
    )
    complaints = []
    if not one["dropped"]:
        complaints.append("the fault did not happen")
    if one["operations"] < min(LEAST["oracle"], one["asked"]):
        complaints.append(f"only {one['operations']} operations, wanted {LEAST['oracle']} at least")
    return said, complaints


def _reliable(data: Any) -> tuple[str, list[str]]:
    ranks, dropped = data["ranks"], sum(data["netem"])
    wrong = sum(any(one["deviations"]) + one["strange"] for one in ranks)
    missing = _sum(data, "packets_missing")
    resent = _sum(data, "packets_resent")
    said = (
        f"{len(ranks[0]['deviations'])} operations of {LOSS_PACKETS} packets; netem dropped "
        f"{dropped}; {resent} resent, {missing} missing; wrong: {wrong}"
    )
    complaints = _failed(data)
    if wrong or missing:
        complaints.append(f"{wrong} results are wrong, {missing} packets missing")
    if not dropped or not resent:
        complaints.append("the fault did not happen")
    return said, complaints


def _lossy(data: Any) -> tuple[str, list[str]]:
    ranks, dropped = data["ranks"], sum(data["netem"])
    # The owner keeps its own elements, so a single rank's results lean towards its own: it is the
    # mean of both that does not.
    pairs = zip(*(one["deviations"] for one in ranks), strict=True)
    means = [statistics.fmean(pair) for pair in pairs]
    mean = statistics.fmean(means)
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    strange, missing = sum(one["strange"] for one in ranks), _sum(data, "packets_missing")
    expected = missing + _sum(data, "packets_received")
    said = (
        f"{len(means)} operations of {LOSS_PACKETS} packets; netem dropped {dropped}; {missing} of "
        f"{expected} missing ({missing / expected:.2%}); bias {mean:+.5f} of the spread, standard "
        f"error {error:.5f}"
    )
    complaints = _failed(data)
    if abs(mean) > SIGMAS * error:
        complaints.append(f"the means lean by {mean:+.5f}, more than {SIGMAS:g} x {error:.5f}")
    if strange:
        complaints.append(f"{strange} packets hold no mean of a part of the ranks")
    if not missing or not dropped:
        complaints.append("the fault did not happen")
    if missing > dropped:
        complaints.append(f"{missing} packets are missing, netem dropped {dropped} only")
    if len(means) < LEAST["lossy"]:
        complaints.append(f"only {len(means)} operations, wanted {LEAST['lossy']} at least")
    return said, complaints


def _killed(data: Any) -> tuple[str, list[str]]:
    one, other = data["ranks"]
    said = (
        f"rank 1 killed after {one['operations']} operations; rank 0's fails {one['after']:.2f} s "
        f"later, bound {one['bound']:g} s: {one['kind']} of peer {one['peer']}"
    )
    complaints = []
    if other.get("error") != "ended with -9":
        complaints.append(f"rank 1 was not killed: {other}")
    if one["kind"] != "LinkError" or one["peer"] != 1 or "rank 1" not in one["text"]:
        complaints.append(f"wanted a LinkError that names rank 1: {one['text']}")
    if one["after"] > LATE * one["bound"]:
        complaints.append(f"noticed after {one['after']:.1f} s, wanted {one['bound']:g} s")
    if not one["operations"]:
        complaints.append("no operation had ended before")
    return said, complaints


def _cut(data: Any) -> tuple[str, list[str]]:
    ranks = data["ranks"]
    wrong, longest = sum(one["wrong"] for one in ranks), max(one["longest"] for one in ranks)
    events = [", ".join(dict.fromkeys(one["events"])) or "none" for one in ranks]
    said = (
        f"rank 0's link is cut for {CUT_FOR_S:g} s: {ranks[0]['operations']} operations, "
        f"{ranks[0]['after']} of them after it, the longest {longest:.1f} s; events of rank 0: "
        f"{events[0]}, of rank 1: {events[1]}; {_sum(data, 'packets_resent')} resent; wrong: "
        f"{wrong}"
    )
    complaints = _failed(data)
    if wrong:
        complaints.append(f"{wrong} results are wrong")
    if longest < CUT_FOR_S / 2:
        complaints.append("the fault did not happen")
    if not ranks[0]["after"]:
        complaints.append("nothing has gone on after it")
    return said, complaints


def _speed(data: Any) -> tuple[str, list[str]]:
    complaints = []
    if not all(one["right"] for one in data["ranks"]):
        complaints.append("results are wrong")
    for rank, one in enumerate(data["ranks"]):
        for name, rows in one["rows"].items():
            if any(row["wire"] < row["bytes"] for row in rows):
                complaints.append(f"{name} of rank {rank} went past {INTERFACES[rank]}")
    rows = data["ranks"][0]["rows"]
    rounds = len(rows[next(iter(WAYS))])
    return f"{rounds} rounds of {SPEED_EACH} all-reduces of 1 MiB, by each link in turn", complaints


def speeds(data: Any) -> list[list[str]]:
    """The links side by side, as LINKS has them: medians of rounds of the tensor's megabytes, and
    CPU time of all rounds together."""
    lines = []
    size = 4 * SPEED_ELEMENTS * SPEED_EACH
    for name in WAYS:
        ranks = [one["rows"][name] for one in data["ranks"]]
        rate = statistics.median(size / row["seconds"] / 1e6 for row in ranks[0])
        packets = [sum(row["packets"] for row in rows) for rows in ranks]
        seconds = [sum(row["cpu"] for row in rows) for rows in ranks]
        own = [1e6 * cpu / count for cpu, count in zip(seconds, packets, strict=True)]
        kernel = 1e6 * sum(row["kernel_cpu"] for row in ranks[0]) / sum(packets)
        resent = sum(int(row["resent"]) for rows in ranks for row in rows)
        costs = (f"{us:.1f} us" for us in (*own, kernel))
        lines.append([name, f"{rate:.1f}", *costs, f"{resent}"])
    return lines


def table(rows: Sequence[Verdict]) -> str:
    lines = []
    for row in rows:
        verdict = "failed" if row.complaints else "ok"
        lines.append(f"{row.name:<12}{verdict:<8}{row.seconds:>6.1f} s  {row.said}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = netem_guest.parser_of_check("python -m tools.rdma_check", about, SECONDS)
    add_report(parser, CASES.page)
    chosen = parser.parse_args(arguments)
    if chosen.dry_run:
        print(script(), end="")
        return 0
    if lacking():
        netem_guest.say(lacking())
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        version, status = netem_guest.run(
            script(), chosen.cache, Path(place), chosen.seconds, EXTRAS
        )
        out = Path(place) / "out"
        found = {path.name: path.read_text() for path in out.iterdir()}
    said = found.get("log", "")
    print(said, end="")
    if status:
        seconds = time.monotonic() - begin
        netem_guest.say(f"the script ended with status {status} after {seconds:.0f} s")
        return 1
    judged = verdicts(found)
    complaints = [text for verdict in judged for text in verdict.complaints]
    outcome = "\n".join(complaints) if complaints else "all holds"
    speed = json.loads(found["speed.json"])
    compared = ""
    if not any("error" in one for one in speed["ranks"]):
        compared = f"{LINKS.report(chosen.report, speeds(speed))}\n\n"
    CASES.report(chosen.report, [[verdict.name, verdict.said] for verdict in judged])
    text = (
        f"python -m tools.rdma_check, {date.today().isoformat()}, Linux {version} in QEMU "
        f"without KVM, {time.monotonic() - begin:.0f} s\n\n{table(judged)}\n\n{compared}{outcome}\n"
    )
    print(text)
    if chosen.keep:
        chosen.keep.write_text(f"{text}\nWhat ran in the guest, and what it said:\n\n{said}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

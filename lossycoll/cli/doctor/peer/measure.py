"""The measurements, one after another and each both ways: ports, size, loss, rate, idle flows."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from .analysis import LIMITS, Flow, Rate, flow_of, rate_of
from .control import Control, number, numbers
from .packets import (
    BLAST,
    FLOW,
    IDLE,
    IP_BYTES,
    SIZE,
    Arrival,
    dropped_here,
    packet,
    receive_train,
    send_train,
    take,
)
from .ports import MOST_PORTS, Ports, Reach, try_ports

SMALLEST: Final = 576
LARGEST: Final = 9000
STEPS: Final = (64, 8, 1)
"""Of packet sizes, from pass to pass."""
SIZE_RATE: Final = 2e6
FLOW_PACKETS: Final = 1000
FLOW_RATE: Final = 1.25e6
FLOW_BYTES: Final = 1200
BLAST_SECONDS: Final = 2.0
IDLE_SECONDS: Final = (5, 10, 20, 31, 61, 121, 181, 301)
"""How long flows are left alone; Linux forgets one that nobody has answered after 30 s."""
GRACE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Direction:
    """One direction. None: no UDP packet of it came, so there is nothing to measure.

    Attributes:
        mtu: The largest packet that arrived whole, with its headers.
        dropped: Packets of the fastest train that the receiver's socket had no room for.
        idle: Seconds of silence that a flow survived, by whether it did.
    """

    mtu: int = 0
    flow: Flow | None = None
    rate: Rate | None = None
    dropped: int = 0
    idle: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """All that was measured, seen from this end."""

    reach: Reach
    rtt_ms: float
    out: Direction
    back: Direction


@dataclass(frozen=True)
class Limits:
    """How much may be sent, agreed by both ends.

    Attributes:
        mtu: The smaller one of both interfaces.
        budget: Bytes of the fastest train.
        rate: Its bytes per second.
        idle: Seconds.
    """

    mtu: int
    budget: int
    rate: float
    idle: int


Tell = Callable[[str], None]


def measure(control: Control, ports: Ports, limits: Limits, tell: Tell) -> Found:
    """Measures all; both ends at once."""
    tell("ports: TCP and UDP, both ways")
    reach = try_ports(control, ports)
    both = sorted(set(reach.out.heard) & set(reach.back.heard))
    ways: dict[bool, Direction] = {}
    for is_out in (True, False) if control.leads else (False, True):
        heard = reach.out.heard if is_out else reach.back.heard
        if not heard:
            ways[is_out] = Direction()
            continue
        pair = (both or heard)[0]
        to = reach.targets[pair] if is_out else None
        ways[is_out] = _way(control, ports.udp[pair], to, limits, tell)
    idle = _idle(control, ports, reach, both[1:], limits.idle, tell)
    out, back = (
        Direction(one.mtu, one.flow, one.rate, one.dropped, found)
        for one, found in zip((ways[True], ways[False]), idle, strict=True)
    )
    return Found(reach, control.rtt_ms, out, back)


def _way(
    control: Control, end: socket.socket, to: tuple[str, int] | None, limits: Limits, tell: Tell
) -> Direction:
    """One direction; ``to`` is None where this end receives."""
    arrow = "to" if to else "from"
    headers = IP_BYTES[end.family]
    tell(f"{arrow} the other end: packet size")
    mtu = _mtu(control, end, to, min(limits.mtu, LARGEST), headers)
    size = max(mtu, SMALLEST) - headers
    tell(f"{arrow} the other end: loss and order, {FLOW_PACKETS * FLOW_BYTES / FLOW_RATE:.0f} s")
    sizes = [min(FLOW_BYTES, size)] * FLOW_PACKETS
    flow_train = _train(control, end, to, FLOW, 0, sizes, FLOW_RATE)
    tell(
        f"{arrow} the other end: rate, up to {limits.budget >> 20} MiB in {BLAST_SECONDS:g} s at "
        f"up to {limits.rate * 8e-6:.0f} Mbit/s"
    )
    sizes = [size] * (limits.budget // size)
    before = dropped_here(end)
    arrivals, sent, took = _train(control, end, to, BLAST, 0, sizes, limits.rate)
    if to is not None:
        return _told(control.receive("way"), mtu)
    flow = flow_of(*flow_train[:2])
    rate = rate_of(arrivals, sent, took, flow.lost)
    dropped = dropped_here(end) - before
    if 2 * dropped > rate.lost * sent > 0:
        rate = replace(rate, limit="receiver", burst=0)
    control.send(
        "way",
        flow=[flow.sent, flow.lost, flow.late, flow.doubled, flow.run],
        rate=[rate.sent, rate.got, rate.lost, rate.burst, rate.queue_ms],
        limit=rate.limit,
        dropped=dropped,
    )
    return Direction(mtu, flow, rate, dropped)


def _told(said: Mapping[str, Any], mtu: int) -> Direction:
    """What the receiver has found, checked."""
    count, lost, late, doubled, longest = _reals(said.get("flow"), 5)
    flow = Flow(int(count), lost, late, doubled, int(longest))
    speed, got, lost, burst, queue = _reals(said.get("rate"), 5)
    limit = next((one for one in LIMITS if one == said.get("limit")), LIMITS[0])
    rate = Rate(speed, got, lost, int(burst), queue, limit)
    return Direction(mtu, flow, rate, number(said, "dropped", 0, 1 << 31))


def _reals(said: object, count: int) -> list[float]:
    """Numbers that the other end says; zeros where they are none."""
    found = said if isinstance(said, list) and len(said) == count else [0] * count
    return [one if isinstance(one, (int, float)) and 0 <= one < 1e12 else 0 for one in found]


def _train(
    control: Control,
    end: socket.socket,
    to: tuple[str, int] | None,
    kind: int,
    run: int,
    sizes: list[int],
    rate: float,
) -> tuple[list[Arrival], int, float]:
    if to is None:
        return receive_train(end, control, kind, run)
    seconds = BLAST_SECONDS if kind == BLAST else 10.0
    count, took = send_train(end, to, control, kind, run, sizes, rate, seconds)
    return [], count, took


def _mtu(
    control: Control, end: socket.socket, to: tuple[str, int] | None, most: int, headers: int
) -> int:
    """The largest packet that arrives, in passes of ever smaller steps."""
    low, high = 0, most + 1
    for run, step in enumerate(STEPS):
        grid = sorted({*range(max(low + step, SMALLEST), high, step), *([most] if not run else [])})
        sizes = [one - headers for one in grid if one > low for _ in range(2)]
        arrivals, _, _ = _train(control, end, to, SIZE, run, sizes, SIZE_RATE)
        if to is None:
            low = max([low, *(one.size + headers for one in arrivals)])
            control.send("largest", size=low)
        else:
            low = number(control.receive("largest"), "size", 0, most)
        high = min(high, low + step) if low else high
        if low >= most:
            high = low
    return low


def _idle(
    control: Control,
    ports: Ports,
    reach: Reach,
    pairs: list[int],
    most: int,
    tell: Tell,
) -> tuple[dict[int, bool], dict[int, bool]]:
    """How long flows live that nobody uses: to the other end, and from it.

    Each pair of ports is used once after its silence, by one end.
    """
    times = [one for one in IDLE_SECONDS if one <= most][: len(pairs) // 2]
    used = pairs[: 2 * len(times)]
    if not times:
        return {}, {}
    for _ in range(2):  # both ends open the flow
        for pair in used:
            with contextlib.suppress(OSError):
                ports.udp[pair].sendto(packet(control, IDLE, 0, pair), reach.targets[pair])
        time.sleep(0.1)
    control.swap("idle")
    begin = time.monotonic()
    for index, seconds in enumerate(times):
        tell(f"flows that are idle: {seconds} of {times[-1]} s")
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        pair = used[2 * index + (0 if control.leads else 1)]
        for _ in range(3):
            with contextlib.suppress(OSError):
                ports.udp[pair].sendto(packet(control, IDLE, 1, pair), reach.targets[pair])
            time.sleep(0.02)
    time.sleep(GRACE_SECONDS)
    heard = [pair for pair in used if take(ports.udp[pair], control, IDLE, 1)]
    told = numbers(control.swap("alive", pairs=heard), "pairs", MOST_PORTS, MOST_PORTS)
    own, other = (0, 1) if control.leads else (1, 0)
    out = {seconds: used[2 * n + own] in told for n, seconds in enumerate(times)}
    back = {seconds: used[2 * n + other] in heard for n, seconds in enumerate(times)}
    return out, back

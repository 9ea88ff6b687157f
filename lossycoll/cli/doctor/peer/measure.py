"""The measurements, one after another and each both ways: ports, size, loss, rate, idle flows."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Final

from .control import Control, number, numbers
from .probes import (
    BLAST,
    FLOW,
    IDLE,
    IP_BYTES,
    LIMITS,
    MOST_PORTS,
    SIZE,
    Arrival,
    Direction,
    Flow,
    Found,
    Ports,
    Rate,
    dropped_here,
    packet,
    receive_train,
    send_train,
    take,
    try_ports,
)

WINDOW: Final = 100
"""Packets over which loss is looked at, to find where a burst ends."""
OFTEN: Final = 0.1
"""Share of a window that is lost where a limit is reached."""
QUEUED: Final = 0.3
"""A queue of this share of what was sent too fast is no policer."""
DROPS: Final = 0.2
"""Share of the rest that a policer drops at least. Less may be the path's own loss, in bursts."""
NO_QUEUE_MS: Final = 1.0
NEAR: Final = 20


def flow_of(arrivals: Sequence[Arrival], sent: int) -> Flow:
    order = [one.number for one in arrivals]
    seen = set(order)
    late = sum(each < top for each, top in zip(order, accumulate(order, max), strict=True))
    runs = groupby(range(sent), seen.__contains__)
    longest = max((len(list(run)) for came, run in runs if not came), default=0)
    all_sent = max(sent, 1)
    doubled = len(order) - len(seen)
    return Flow(sent, 1 - len(seen) / all_sent, late / all_sent, doubled / all_sent, longest)


def rate_of(
    arrivals: Sequence[Arrival], sent: int, seconds: float, lost_anyway: float = 0.0
) -> Rate:
    """Rate that passes, and its limit; ``lost_anyway``: the loss at a modest pace.

    A queue delays what comes too fast until it is full; a policer lets a burst pass without delay
    and drops the rest.
    """
    if len(arrivals) < 2 * NEAR:
        return Rate(0.0, 0.0, lost=1 - len(arrivals) / max(sent, 1))
    size = arrivals[0].size
    speed = sent * size / max(seconds, 1e-3)
    seen = {one.number for one in arrivals}
    lost = 1 - len(seen) / max(sent, 1)
    end = _end_of_burst(seen, sent, max(OFTEN, 3 * lost_anyway))
    rest = [one for one in arrivals if one.number >= end + WINDOW]
    rest = rest if len(rest) >= NEAR else [one for one in arrivals if one.number >= end]
    base = min(one.came - one.sent for one in arrivals)
    if end >= sent or len(rest) < NEAR:
        growth = statistics.median(one.came - one.sent for one in arrivals[-NEAR:]) - base
        span = (arrivals[-1].came - arrivals[0].came) / 1e9
        got = len(arrivals) * size / max(span, 1e-3)
        limit = "queue" if got < 0.8 * speed and growth > 0.2 * span * 1e9 else "none"
        return Rate(_mbit(speed), _mbit(min(got, speed)), lost, 0, growth / 1e6, limit)
    passed = len(rest) * size / max((rest[-1].came - rest[0].came) / 1e9, 1e-3)
    before = [one for one in arrivals if one.number < end][-NEAR:] or rest[:NEAR]
    growth = statistics.median(one.came - one.sent for one in before) - base
    burst = end * size
    too_much = burst * max(0.0, 1 - passed / speed)
    is_policed = growth / 1e9 < QUEUED * too_much / passed
    dropped = 1 - len(rest) / max(1, sent - rest[0].number)
    if dropped < DROPS and (is_policed or growth / 1e6 < NO_QUEUE_MS):
        return Rate(_mbit(speed), _mbit(min(passed, speed)), lost, 0, growth / 1e6)
    limit = "policer" if is_policed else "queue"
    if is_policed:  # a bucket is filled again while it is emptied, for longer on a busy machine
        last = max((one.came for one in arrivals if one.number < end), default=arrivals[0].came)
        burst = max(size, burst - int(passed * (last - arrivals[0].came) / 1e9))
        passed = _refilling(rest, burst, passed)
    return Rate(_mbit(speed), _mbit(passed), lost, burst, growth / 1e6, limit)


def _end_of_burst(seen: set[int], sent: int, often: float) -> int:
    """The first packet from which on more than that share is lost; ``sent``: there is none."""
    missing = [number not in seen for number in range(sent)]
    lost = sum(missing[:WINDOW])
    for begin in range(max(0, sent - WINDOW)):
        if missing[begin] and lost > often * WINDOW:
            dense = (one for one in range(begin, begin + WINDOW) if missing[one])
            return next((one for one in dense if sum(missing[one : one + 10]) >= 5), begin)
        lost += missing[begin + WINDOW] - missing[begin]
    return sent


def _refilling(arrivals: Sequence[Arrival], burst: int, passed: float) -> float:
    """Rate, bytes a second, at which a bucket of ``burst`` bytes fills, from what passes a policer.

    A bucket that is full fills no more: of a pause of the sender, only the time that an empty one
    needs counts. ``passed``: the rate with all pauses.
    """
    gaps = [(b.sent - a.sent) / 1e9 for a, b in pairwise(arrivals)]
    nbytes = sum(one.size for one in arrivals)
    for _ in range(NEAR):
        counted = sum(min(gap, burst / passed) for gap in gaps)
        if counted <= 0 or nbytes / counted <= passed * 1.001:
            break
        passed = nbytes / counted
    return passed


def _mbit(rate: float) -> float:
    return rate * 8 / 1e6


SMALLEST: Final = 576
LARGEST: Final = 9000
STEPS: Final = (64, 8, 1)
"""Steps of packet sizes, from pass to pass."""
SIZE_RATE: Final = 2e6
FLOW_PACKETS: Final = 1000
FLOW_RATE: Final = 1.25e6
FLOW_BYTES: Final = 1200
BLAST_SECONDS: Final = 2.0
IDLE_SECONDS: Final = (5, 10, 20, 31, 61, 121, 181, 301)
"""Idle times of flows; Linux forgets an unanswered flow after 30 s."""
GRACE_SECONDS: Final = 1.0


Tell = Callable[[str], None]


async def measure(control: Control, ports: Ports, tell: Tell) -> Found:
    tell("ports: TCP and UDP, both ways")
    found = await try_ports(control, ports)
    both = sorted(set(found.out.heard) & set(found.back.heard))
    for is_out in (control.leads, not control.leads):
        direction = found.out if is_out else found.back
        if direction.heard:
            pair = (both or direction.heard)[0]
            to = ports.targets[pair] if is_out else None
            await _Way(control, ports.udp[pair], to, direction, tell).measure()
    await _idle(control, ports, found, both[1:], tell)
    found.rtt_ms = control.rtt_ms
    return found


@dataclass(frozen=True)
class _Way:
    """One direction; ``to`` is None where this end receives."""

    control: Control
    end: socket.socket
    to: tuple[str, int] | None
    direction: Direction
    tell: Tell

    async def measure(self) -> None:
        control, limits, direction = self.control, self.control.limits, self.direction
        arrow = "to" if self.to else "from"
        headers = IP_BYTES[self.end.family]
        self.tell(f"{arrow} the other end: packet size")
        direction.mtu = await self._mtu(min(limits.mtu, LARGEST), headers)
        size = max(direction.mtu, SMALLEST) - headers
        seconds = FLOW_PACKETS * FLOW_BYTES / FLOW_RATE
        self.tell(f"{arrow} the other end: loss and order, {seconds:.0f} s")
        sizes = [min(FLOW_BYTES, size)] * FLOW_PACKETS
        arrivals, sent, _ = await self._train(FLOW, 0, sizes, FLOW_RATE)
        flow = flow_of(arrivals, sent)
        self.tell(
            f"{arrow} the other end: rate, up to {limits.budget >> 20} MiB in {BLAST_SECONDS:g} s "
            f"at up to {limits.rate} Mbit/s"
        )
        sizes = [size] * (limits.budget // size)
        before = dropped_here(self.end)
        arrivals, sent, took = await self._train(BLAST, 0, sizes, limits.rate * 1e6 / 8)
        if self.to is not None:
            said = await control.receive("way")
            limit = next((one for one in LIMITS if one == said.get("limit")), LIMITS[0])
            direction.flow = Flow(*_five(said.get("flow")))
            direction.rate = Rate(*_five(said.get("rate")), limit)
            direction.dropped = number(said, "dropped", 0, 1 << 31)
            return
        rate = rate_of(arrivals, sent, took, flow.lost)
        dropped = dropped_here(self.end) - before
        if 2 * dropped > rate.lost * sent > 0:
            rate = replace(rate, limit="receiver", burst=0)
        *figures, limit = astuple(rate)
        control.send("way", flow=astuple(flow), rate=figures, limit=limit, dropped=dropped)
        direction.flow, direction.rate, direction.dropped = flow, rate, dropped

    async def _train(
        self, kind: int, run: int, sizes: list[int], rate: float
    ) -> tuple[list[Arrival], int, float]:
        if self.to is None:
            return await receive_train(self.end, self.control, kind, run)
        seconds = BLAST_SECONDS if kind == BLAST else 10.0
        await send_train(self.end, self.to, self.control, kind, run, sizes, rate, seconds)
        return [], 0, 0.0

    async def _mtu(self, most: int, headers: int) -> int:
        """The largest packet that arrives, in passes of ever smaller steps."""
        low, high = 0, most + 1
        for run, step in enumerate(STEPS):
            grid = {*range(max(low + step, SMALLEST), high, step), *([most] if not run else [])}
            sizes = [one - headers for one in sorted(grid) if one > low for _ in range(2)]
            arrivals, _, _ = await self._train(SIZE, run, sizes, SIZE_RATE)
            if self.to is None:
                low = max([low, *(one.size + headers for one in arrivals)])
                self.control.send("largest", size=low)
            else:
                low = number(await self.control.receive("largest"), "size", 0, most)
            high = min(high, low + step) if low else high
            if low >= most:
                high = low
        return low


def _five(said: object) -> tuple[float, float, float, float, float]:
    """Numbers that the other end says; zeros where they are none."""
    found = said if isinstance(said, list) and len(said) == 5 else [0] * 5
    a, b, c, d, e = (
        one if isinstance(one, (int, float)) and 0 <= one < 1e12 else 0 for one in found
    )
    return a, b, c, d, e


async def _idle(control: Control, ports: Ports, found: Found, pairs: list[int], tell: Tell) -> None:
    """Lifetimes of idle flows, to the other end and from it. Each pair of ports is
    used once after its silence, by one end; of the times, the longest that there are pairs for."""

    def send(pair: int, run: int) -> None:
        with contextlib.suppress(OSError):
            ports.udp[pair].sendto(packet(control, IDLE, run, pair), ports.targets[pair])

    fit = len(pairs) // 2
    times = [one for one in IDLE_SECONDS if one <= control.limits.idle][-fit:] if fit else []
    if not times:
        return
    used = pairs[: 2 * len(times)]
    for _ in range(2):  # both ends open the flow
        for pair in used:
            send(pair, 0)
        await asyncio.sleep(0.1)
    await control.swap("idle")
    begin = time.monotonic()
    own, other = (0, 1) if control.leads else (1, 0)
    for index, seconds in enumerate(times):
        tell(f"flows that are idle: {seconds} of {times[-1]} s")
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        for _ in range(3):
            send(used[2 * index + own], 1)
            await asyncio.sleep(0.02)
    await asyncio.sleep(GRACE_SECONDS)
    heard = [pair for pair in used if take(ports.udp[pair], control, IDLE, 1)]
    told = numbers(await control.swap("alive", pairs=heard), "pairs", MOST_PORTS, MOST_PORTS)
    for n, seconds in enumerate(times):
        found.out.idle[seconds] = used[2 * n + own] in told
        found.back.idle[seconds] = used[2 * n + other] in heard

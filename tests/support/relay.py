"""A relay between engines, which owns the ports that they know each other by.

It drops, doubles, delays, damages and reorders what they really send, control as well as data, and
sends what they never did.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lossycoll.plan import Plan, hierarchical, ring
from lossycoll.plan.order import draw_order
from lossycoll.runtime.engine.reports import EngineStats
from tests.support.network import GROUP, SESSION, Ended, Network, elements

PAYLOAD = 256
PER_PACKET = PAYLOAD // 4
HEADER = struct.Struct("<HBBIQIIIHHHHHBBII")
DATA, CONTROL, RECORD_BYTES = 1, 2, 32
FIRST = 8
"""Of the format: a packet of the first round, which says the code instead of the round."""
READY, WANT, FIN, NACK, DONE, ACK, PROBE = 1, 2, 3, 4, 5, 6, 7


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Packet:
    """A packet, field by field. What is None is made right."""

    payload: bytes = bytes(PAYLOAD)
    magic: int = 0x4C43
    version: int = 8
    type: int = DATA
    crc: int | None = None
    session: int = SESSION
    link_seq: int = 0
    op: int | None = None
    packet: int = 0
    slot: int = 0
    sender: int = 1
    receiver: int = 0
    length: int | None = None
    count: int = 1
    round: int = 0
    format: int = 0
    code: int = 0
    first: bool | None = None
    group: int = GROUP
    time_us: int = 0

    def bytes(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        first = self.type != CONTROL and not self.round if self.first is None else self.first
        round, format = self.round, self.format
        if first:
            round |= self.code & 255
            format |= FIRST | self.code >> 8 << 4

        op = self.op
        if op is None:
            op = crc32c(self.payload) if self.type == CONTROL else 0

        def header(crc: int) -> bytes:
            return HEADER.pack(
                self.magic,
                self.version,
                self.type,
                crc,
                self.session,
                self.link_seq,
                op,
                self.packet,
                self.slot,
                self.sender,
                self.receiver,
                length,
                self.count,
                round,
                format,
                self.group,
                self.time_us,
            )

        crc = crc32c(header(0)) if self.crc is None else self.crc
        return header(crc) + self.payload


def split(datagram: bytes) -> list[bytes]:
    """Its packets: one, or a control packet and another one after it."""
    end = HEADER.size + int.from_bytes(datagram[34:36], "little")
    if datagram[3] != CONTROL or len(datagram) <= end:
        return [datagram]
    return [datagram[:end], datagram[end:]]


# ---- a relay between engines ----


@dataclass
class Faults:
    """Fractions of what passes. ``delay``: longest extra way of a reordered datagram, seconds."""

    drop: float = 0.0
    dup: float = 0.0
    reorder: float = 0.0
    delay: float = 0.005
    damage: float = 0.0
    seed: int = 1
    held: tuple[int, int] | None = None  # sender and receiver of what waits until this changes
    mute: int = 0  # the kind of record that nobody gets to see
    last: int | None = None  # the data packet (counted by Passed) after which rank 1 gets nothing


@dataclass
class Passed:
    data: int = 0
    control: int = 0
    probes: int = 0
    dropped_data: int = 0
    dropped_control: int = 0
    muted: int = 0
    doubled: int = 0
    delayed: int = 0
    damaged: int = 0
    captured: list[tuple[int, bytes]] = field(default_factory=list)
    """(receiver, datagram), the first few thousand."""
    epochs: set[int] = field(default_factory=set)
    """Of all packets' keys, where packets are sealed."""


def without(kind: int, control: bytes) -> bytes:
    """The datagram with each record of that kind overwritten by its acknowledgement, the first one.

    Other records in it go their way: several that wait may share a datagram.
    """
    header, payload = bytearray(control[: HEADER.size]), control[HEADER.size :]
    records = [payload[at : at + RECORD_BYTES] for at in range(0, len(payload), RECORD_BYTES)]
    payload = b"".join(records[0] if record[0] == kind else record for record in records)
    header[4:8], header[20:24] = bytes(4), crc32c(payload).to_bytes(4, "little")
    header[4:8] = crc32c(header).to_bytes(4, "little")
    return bytes(header) + payload


class Relay:
    """Port ``i`` stands for rank i: whoever is sent something by rank i gets it from there."""

    def __init__(self, ports: list[int], faults: Faults) -> None:
        self.faults = faults
        self.passed = Passed()
        self.random = random.Random(faults.seed)
        self.rank_of = {("127.0.0.1", port): rank for rank, port in enumerate(ports)}
        self.real = [("127.0.0.1", port) for port in ports]
        self.sockets = []
        for _ in ports:
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            s.bind(("127.0.0.1", 0))
            s.setblocking(False)
            self.sockets.append(s)
        self.addresses = [s.getsockname() for s in self.sockets]
        self.late: list[tuple[float, int, int, int, bytes]] = []
        self.kept: list[tuple[int, int, bytes]] = []
        self.count = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @staticmethod
    def packets(datagram: bytes) -> list[bytes]:
        """What passes or not by itself."""
        return split(datagram)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(5)
        for s in self.sockets:
            s.close()

    def send(self, sender: int, receiver: int, data: bytes) -> None:
        """As if ``sender`` had sent it."""
        with contextlib.suppress(BlockingIOError):
            self.sockets[sender].sendto(data, self.real[receiver])

    def _run(self) -> None:
        poll = select.poll()
        receivers = {}
        for rank, s in enumerate(self.sockets):
            poll.register(s, select.POLLIN)
            receivers[s.fileno()] = rank
        while not self.stop.is_set():
            wait = 50.0
            if self.late:
                wait = max(0.0, (self.late[0][0] - time.monotonic()) * 1000)
            if self.kept and self.faults.held is None:
                for number, waiting in enumerate(self.kept):
                    self.send(*waiting)
                    if number % 8 == 0:
                        time.sleep(0.002)  # all at once would be too much for a buffer
                self.kept.clear()
            for fd, _ in poll.poll(wait):
                self._drain(receivers[fd])
            while self.late and self.late[0][0] <= time.monotonic():
                _, _, sender, receiver, data = heapq.heappop(self.late)
                self.send(sender, receiver, data)

    def _drain(self, receiver: int) -> None:
        for _ in range(64):
            try:
                data, address = self.sockets[receiver].recvfrom(65536)
            except BlockingIOError:
                return
            sender = self.rank_of.get(address)
            if sender is not None:
                for packet in self.packets(data):
                    self._pass(sender, receiver, packet)

    def _pass(self, sender: int, receiver: int, data: bytes) -> None:
        faults, passed, draw = self.faults, self.passed, self.random.random
        control = data[3] == CONTROL
        if len(passed.captured) < 4000:
            passed.captured.append((receiver, data))
        passed.epochs.add(data[6] | data[7] << 8)
        if control:
            passed.control += 1
            passed.probes += PROBE in data[HEADER.size :: RECORD_BYTES]
        else:
            passed.data += 1
        if control and faults.mute and faults.mute in data[HEADER.size :: RECORD_BYTES]:
            passed.muted += 1
            data = without(faults.mute, data)
        if faults.held == (sender, receiver):
            self.kept.append((sender, receiver, data))
            return
        outage = faults.last is not None and passed.data > faults.last and receiver == 1
        if outage or draw() < faults.drop:
            if control:
                passed.dropped_control += 1
            else:
                passed.dropped_data += 1
            return
        if draw() < faults.damage:
            passed.damaged += 1
            bad = bytearray(data)
            # Of data the header; of control the records as well.
            end = len(split(data)[0]) if data[3] == CONTROL else HEADER.size
            bad[self.random.randrange(end)] ^= 1 << self.random.randrange(8)
            data = bytes(bad)
        if draw() < faults.dup:
            passed.doubled += 1
            self._later(sender, receiver, data)
        if draw() < faults.reorder:
            passed.delayed += 1
            self._later(sender, receiver, data)
            return
        self.send(sender, receiver, data)

    def _later(self, sender: int, receiver: int, data: bytes) -> None:
        due = time.monotonic() + self.random.random() * self.faults.delay
        self.count += 1
        heapq.heappush(self.late, (due, self.count, sender, receiver, data))


class RelayedNetwork(Network):
    """A network whose engines know each other by the relay's ports."""

    def __init__(
        self, world: int, faults: Faults, payload_bytes: int = PAYLOAD, **options: Any
    ) -> None:
        self.faults = faults
        super().__init__(
            world, payload_bytes, **{"deadline_min": 5.0, "deadline_max": 20.0, **options}
        )

    def introduce(self, ports: list[int]) -> list[tuple[str, int]]:
        self.relay = Relay(ports, self.faults)
        return self.relay.addresses

    def __exit__(self, *error: object) -> None:
        super().__exit__(None, None, None)
        self.relay.close()


def all_reduce(world: int, count: int, op: int, per_packet: int = PER_PACKET) -> list[Plan]:
    builder = (ring.all_reduce, hierarchical.all_reduce)[op % 2]
    order = draw_order(3, GROUP, op, world)
    return [builder(world, r, count, per_packet, order=order) for r in range(world)]


def assert_sums(network: Network, count: int, turns: int, **how: object) -> list[Ended]:
    """All-reduces that must be exact, one after another."""
    ended = []
    for _ in range(turns):
        plans = all_reduce(network.world, count, network.op, network.payload_bytes // 4)
        rng = np.random.default_rng(network.op)
        data = [elements("f32", count, rng) for _ in plans]
        want = np.sum(data, axis=0, dtype=np.float32)
        ended += network.run(plans, data, data, "f32", float(network.world), **how)
        assert all(e.code == 0 for e in ended), [e.failure for e in ended]
        for array in data:
            np.testing.assert_array_equal(array, want)
    return ended


def figures(network: Network, rank: int, settled: Callable[[EngineStats], bool]) -> EngineStats:
    """Waits until the figures are those expected, or as long as they may take."""
    end = time.monotonic() + 3
    while True:
        stats = network.engines[rank].stats()
        if settled(stats) or time.monotonic() > end:
            return stats
        time.sleep(0.02)

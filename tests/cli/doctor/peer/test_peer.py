"""Two doctors that look at the network between them, and what else they may meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from lossycoll.cli.doctor.checks import Severity
from lossycoll.cli.doctor.peer import command, control, measure
from lossycoll.cli.doctor.peer.arrivals import Arrival, flow_of, rate_of
from lossycoll.cli.doctor.peer.control import Control, Limits, Meeting, PeerError
from lossycoll.cli.doctor.peer.measure import Direction, Found
from lossycoll.cli.main import main
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.runtime.engine.failures import place_text
from tests.support.harness import free_port
from tests.support.lab_kit import ROOT, needs_lab

LIMITS = Limits(mtu=1500, budget=1 << 20, idle=0, rate=100)

# ---- who is at the other end ----


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def trouble_of(port: int, seconds: float, host: str = "127.0.0.1") -> str:
    """Reason why no other doctor is found."""
    with pytest.raises(PeerError) as trouble:
        asyncio.run(Meeting(host, port, LIMITS).find(seconds))
    return str(trouble.value)


async def nothing(_: Meeting) -> None:
    """In place of a part of a meeting."""


@contextlib.asynccontextmanager
async def two_ends(host: str = "127.0.0.1") -> AsyncIterator[list[Control]]:
    port = free_port()
    ends = await asyncio.gather(*(Meeting(host, port, LIMITS).find(20.0) for _ in range(2)))
    try:
        yield ends
    finally:
        for one in ends:
            one.writer.close()


def test_two_doctors_find_each_other_and_share_a_session() -> None:
    async def meet() -> None:
        async with two_ends() as ends:
            assert ends[0].session == ends[1].session
            assert {one.leads for one in ends} == {True, False}
            assert ends[0].limits == LIMITS
            said = await asyncio.gather(ends[0].swap("x", value=8), ends[1].swap("x", value=7))
            assert [one["value"] for one in said] == [7, 8]

    asyncio.run(meet())


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[int]:
    """Something else that listens; ``serve`` is given each connection."""
    with socket.socket(family_of(host)) as end:
        end.bind((host, 0))
        end.listen()
        end.settimeout(20)
        kept = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other, _ = end.accept()
                    kept.append(other)
                    serve(other)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield end.getsockname()[1]
        finally:
            end.shutdown(socket.SHUT_RDWR)
            thread.join()
            for other in kept:
                other.close()


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (lambda end: end.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "says b'SSH-2.0"),
        (lambda end: end.sendall(b'{"step": "go"}\n'), 'says b\'{"step": "go"}\''),
        (lambda end: end.sendall(b'{"step": "hello", "magic": "x"}\n'), "magic"),
        (lambda end: end.sendall(b"x" * 200_000), "without an end of line"),
        (lambda end: end.close(), "closes the connection without a word"),
        (lambda end: None, "says nothing for 0.5 s"),
    ],
    ids=["ssh", "too early", "another hello", "endless", "closes", "silent"],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_something_else_that_listens_is_named_soon(
    host: str,
    serve: Callable[[socket.socket], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "HELLO_SECONDS", 0.5)
    begin = time.monotonic()
    with listener(serve, host) as port:
        trouble = trouble_of(port, 60.0, host)
    assert said in trouble
    assert f"something else listens at {host}, TCP port {port}: it " in trouble
    assert trouble.endswith(f"if this is a rank's control port: --peer {place_text(host, port)}")
    assert time.monotonic() - begin < 30, "the wait for a peer isn't waited out"


def test_a_doctor_of_another_version_is_named() -> None:
    other = dict(asdict(LIMITS), step="hello", magic=control.MAGIC, version=2, nonce="0" * 32)
    with listener(lambda end: end.sendall(json.dumps(other).encode() + b"\n")) as port:
        assert "speaks version 2, this one 1" in trouble_of(port, 20.0)


@pytest.mark.parametrize(("wanted", "host"), [("127.0.0.2", "127.0.0.1"), ("fd00::2", "::1")])
def test_a_stranger_is_refused_and_told(
    wanted: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "_connect", nothing)
    port = free_port()

    async def meet() -> bytes:
        finding = asyncio.create_task(Meeting(wanted, port, LIMITS).find(1.5))
        await asyncio.sleep(0)  # it listens by now
        reader, writer = await asyncio.open_connection(host, port)
        text = await reader.read()
        writer.close()
        with pytest.raises(PeerError, match=f"refused {host}, which isn't {wanted}"):
            await finding
        return text

    text = asyncio.run(meet())
    assert b'"refused"' in text
    assert f"looks at {wanted}, not {host}".encode() in text


def test_nobody_there_ends_in_time_and_says_what_to_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--peer", "127.0.0.1", "--peer-port", str(free_port()), "--json"]) == 1
    assert "127.0.0.1 is this host" in capsys.readouterr().out
    monkeypatch.setattr(Meeting, "_listen", nothing)
    words = ["doctor", "--peer", "127.0.0.1", "--peer-port", str(free_port()), "--wait", "1"]
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["options"] == {}
    (check,) = answer["checks"]
    assert check["status"] == "fail"
    assert "run 'lossycoll doctor --peer' there as well" in check["found"]
    assert main(["doctor", "--peer", "no-such-host.invalid"]) == 1
    assert "no-such-host.invalid' is no host that this one knows" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_meeting_ends_although_an_attempt_fails_at_that_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Meeting, "_listen", nothing)
    for _ in range(50):
        assert "no doctor found" in trouble_of(free_port(), 0.002)
    assert not caplog.records


def test_the_other_end_that_lies_or_goes_is_an_error() -> None:
    for bad in ("x", [1] * 9, [-1], [True], None):
        with pytest.raises(PeerError):
            control.numbers({"ports": bad}, "ports", 8, 9)

    async def meet() -> None:
        async with two_ends() as (one, other):
            other.send("number", value=1 << 40)
            with pytest.raises(PeerError, match="wanted 0 to 9"):
                control.number(await one.receive("number"), "value", 0, 9)
            other.send("other")
            with pytest.raises(PeerError, match="is at step 'other', not 'wanted'"):
                await one.receive("wanted")
            with pytest.raises(PeerError, match="has said nothing for"):
                await one.receive("wanted", 0.1)
            other.writer.close()
            with pytest.raises(PeerError, match="has ended"):
                await one.receive("wanted")
        async with two_ends() as (one, other):
            other.writer.write(b"x" * 200_000)
            with pytest.raises(PeerError, match="without an end of line"):
                await one.receive("wanted")

    asyncio.run(meet())


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("::1", "::")])
def test_packets_of_strangers_are_not_believed(host: str, bound: str) -> None:
    """A socket of IPv6 hears those of IPv4 as well."""

    async def meet() -> None:
        async with two_ends(host) as (one, other):
            with measure.open_udp(bound, 0) as end:
                check(one, other, end)

    def check(one: Control, other: Control, end: socket.socket) -> None:
        port = end.getsockname()[1]
        good = measure.packet(other, measure.FLOW, 3, 5)
        of_another_kind = measure.packet(one, measure.SIZE, 3, 5)
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as sender:
            for data in (good[:-1], bytes(16) + good[16:], of_another_kind, good):
                sender.sendto(data, (host, port))
        time.sleep(0.05)
        found = measure.take(end, one, measure.FLOW, 3)
        assert [arrival.number for arrival, _ in found] == [5]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.2", 0))
            stranger.sendto(good, ("127.0.0.1", port))
        time.sleep(0.05)
        assert not measure.take(end, one, measure.FLOW, 3)

    asyncio.run(meet())


def test_packets_without_room_are_counted_for_their_own_socket() -> None:
    with measure.open_udp("127.0.0.1", 0) as full, measure.open_udp("127.0.0.1", 0) as other:
        full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(100):
            other.sendto(bytes(1000), full.getsockname())
        assert 0 < measure.dropped_here(full) < 100
        assert measure.dropped_here(other) == 0


# ---- what arrivals say ----


def arrivals(
    count: int,
    mbit: float,
    passes: Callable[[int, float], float | None],
    size: int = 1250,
    pause: float = 0.0,
) -> tuple[list[Arrival], float]:
    """``passes``: the delay (s) of a packet that is sent at a time, None: it is lost. ``pause``:
    seconds that the sender is held up after each eighth."""
    found, step = [], size * 8 / mbit / 1e6
    for number in range(count):
        sent = number * step + pause * (8 * number // count)
        delay = passes(number, sent)
        if delay is not None:
            found.append(Arrival(number, int(sent * 1e9), int((sent + delay) * 1e9), size))
    return found, count * step


def policer(mbit: float, bucket: int) -> Callable[[int, float], float | None]:
    left, at = [float(bucket)], [0.0]

    def passes(number: int, now: float) -> float | None:
        left[0] = min(bucket, left[0] + (now - at[0]) * mbit * 1e6 / 8)
        at[0] = now
        if left[0] < 1250:
            return None
        left[0] -= 1250
        return 0.001

    return passes


def queue(mbit: float, room: float) -> Callable[[int, float], float | None]:
    free = [0.0]

    def passes(number: int, now: float) -> float | None:
        wait = max(0.0, free[0] - now)
        if wait > room:
            return None
        free[0] = now + wait + 1250 * 8 / mbit / 1e6
        return 0.001 + wait

    return passes


@pytest.mark.parametrize("lost", [0.0, 0.05])
def test_a_policer_is_told_from_a_queue(lost: float) -> None:
    def with_loss(made: Callable[[int, float], float | None]) -> Any:
        every = round(1 / lost) if lost else 1 << 30
        return lambda number, now: None if number % every == every - 1 else made(number, now)

    made, seconds = arrivals(8000, 400, with_loss(policer(20, 250_000)))
    rate = rate_of(made, 8000, seconds, lost)
    assert rate.limit == "policer"
    assert rate.got == pytest.approx(20, rel=0.1)
    assert rate.burst == pytest.approx(250_000, rel=0.15)
    made, seconds = arrivals(8000, 400, with_loss(queue(50, 0.03)))
    rate = rate_of(made, 8000, seconds, lost)
    assert rate.limit == "queue"
    assert rate.got == pytest.approx(50, rel=0.1)
    assert rate.queue_ms == pytest.approx(30, rel=0.2)


def test_a_sender_that_is_held_up_still_finds_a_policers_rate() -> None:
    """A bucket that is full fills no more, so what passes over the whole time is less."""
    made, seconds = arrivals(8000, 100, policer(20, 100_000), pause=0.4)
    rest = [one for one in made if one.number > 1000]
    whole = 8e-6 * 1250 * len(rest) / ((rest[-1].came - rest[0].came) / 1e9)
    assert whole < 12
    rate = rate_of(made, 8000, seconds + 7 * 0.4)
    assert rate.limit == "policer"
    assert rate.got == pytest.approx(20, rel=0.1)


def test_a_path_that_loses_bursts_is_no_policer() -> None:
    for each in (400, 1500):
        made, seconds = arrivals(
            8000, 400, lambda n, now, each=each: None if n % each < 60 else 0.001
        )
        rate = rate_of(made, 8000, seconds, 0.01)
        assert (rate.limit, rate.burst) == ("none", 0)
        assert 300 < rate.got < 400


def test_a_path_without_limit_and_a_deep_queue() -> None:
    made, seconds = arrivals(4000, 400, lambda number, now: 0.001)
    rate = rate_of(made, 4000, seconds)
    assert (rate.limit, rate.lost, rate.burst) == ("none", 0.0, 0)
    assert rate.got == pytest.approx(400, rel=0.01)
    made, seconds = arrivals(4000, 400, queue(100, 60.0))
    rate = rate_of(made, 4000, seconds)
    assert rate.limit == "queue"
    assert rate.got == pytest.approx(100, rel=0.05)
    assert rate_of([], 100, 1.0).lost == 1.0


def test_loss_order_and_doubles_are_counted() -> None:
    numbers = [0, 1, 3, 2, 3, 7]
    flow = flow_of([Arrival(one, 0, 0, 100) for one in numbers], 10)
    assert flow.lost == pytest.approx(0.5)
    assert flow.late == pytest.approx(0.1)
    assert flow.doubled == pytest.approx(0.1)
    assert flow.run == 3


def test_a_translator_is_named() -> None:
    seen = (("192.168.0.5", 42000), ("198.51.100.7", 1024))
    closed = Direction({42000: "no answer"}, [42000], [])
    found = Found(closed, closed, seen, 1.0)
    checks = list(command.report(found, "node1", "0", 1500))
    (address,) = [one for one in checks if one.name == "address of this host"]
    assert address.status is Severity.FAIL
    assert "NAT" in address.advice
    assert sum(one.status is Severity.FAIL for one in checks) == 5
    assert command.settings(found, 1500, "0") == {"LOSSYCOLL_PORT_RANGE": "42000-42099"}


@pytest.mark.parametrize(
    ("idle", "wanted"),
    [
        ({20: True, 31: False}, "6.7"),
        ({5: False}, "0.83"),
        ({31: True, 61: False}, None),
        ({31: True}, None),
        ({}, None),
    ],
)
def test_flows_are_kept_alive_where_a_firewall_forgets_them_sooner_than_usual(
    idle: dict[int, bool], wanted: str | None
) -> None:
    way = Direction({}, [], [], idle=idle)
    found = command.settings(Found(Direction({}, [], []), way, None, 1.0), 1500, "42000-42009")
    assert found.get("LOSSYCOLL_KEEPALIVE") == wanted


# ---- networks ----

QUICK = "import lossycoll.cli.doctor.peer.measure as m; m.IDLE_SECONDS = (1, 4)"
RUN = "import sys; from lossycoll.cli.main import main; sys.exit(main())"
BLOCK = (
    "ip rule add pref 1 ipproto udp dport 42008-42009 iif eth0 blackhole; "
    "ip rule add pref 2 ipproto tcp dport 42008-42009 iif eth0 blackhole; "
    "ip rule add pref 10 lookup local; ip rule del pref 0"
)
FORGET = "ip rule add pref 3 ipproto udp iif eth0 blackhole"
POLICE = "tc qdisc replace dev eth0 root tbf rate 20mbit burst 100kb limit 3100"


def start(lab: Lab, host: int, *arguments: str) -> subprocess.Popen[str]:
    program = f"{QUICK}; {RUN}"
    peer = ["doctor", "--peer", lab.address(1 - host), "--json", *arguments]
    return lab.start(
        host,
        [sys.executable, "-c", program, *peer],
        {"LOSSYCOLL_PORT_RANGE": "42000-42009", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> tuple[dict[str, Any], dict[str, str]]:
    out, _ = process.communicate(timeout=90)
    said = json.loads(out)
    assert said["ok"] is (process.returncode == 0)
    return {one["name"]: one for one in said["checks"]}, said["options"]


@needs_lab
def test_a_filter_a_policer_and_flows_that_are_forgotten() -> None:
    """Towards host 1 two ports are closed, from host 0 a policer drops, and in mid-test host 1
    forgets all flows."""
    with Lab(Network(hosts=2)) as lab:
        assert lab.start(0, ["sh", "-ec", POLICE]).wait(30) == 0
        assert lab.start(1, ["sh", "-ec", BLOCK]).wait(30) == 0
        ends = [start(lab, host, "--budget", "8", "--idle", "4") for host in range(2)]
        assert ends[1].stderr is not None
        assert any("idle: 4 of 4 s" in line for line in ends[1].stderr)
        assert lab.start(1, ["sh", "-ec", FORGET]).wait(30) == 0
        (first, options), (second, its_options) = map(answer, ends)
    to, back = "to 10.77.0.2", "from 10.77.0.1"
    for checks, name, way in ((first, to, "from 10.77.0.2"), (second, back, "to 10.77.0.1")):
        for kind in ("TCP (control)", "UDP (data)"):
            assert checks[f"{name}: {kind}"]["status"] == "fail"
            assert "8 of 10 ports are reached; not 42008" in checks[f"{name}: {kind}"]["found"]
            assert checks[f"{way}: {kind}"]["status"] == "ok" or kind == "UDP (data)"
        assert checks[f"{name}: packet size"]["found"] == "1500 bytes pass"
        passes = re.match(r"policed: (\d+) KiB pass", checks[f"{name}: rate"]["found"])
        assert passes, checks
        # Of a bucket of 100 KiB, with headers; it fills while a busy machine holds up the sender.
        assert 80 <= int(passes[1]) < 200, checks
        assert checks[f"{name}: idle flows"]["found"] == "forgotten after 1 to 4 s of silence"
        assert "or set LOSSYCOLL_KEEPALIVE=0.33" in checks[f"{name}: idle flows"]["advice"]
        assert checks[f"{way}: idle flows"]["found"] == "alive after 4 s of silence"
        assert checks["address of this host"]["status"] == "ok"
    assert options == its_options
    assert 1.2e6 < float(options["LOSSYCOLL_PACE"]) < 2.6e6
    assert options["LOSSYCOLL_KEEPALIVE"] == "0.33", "a third of the time that flows live"


@needs_lab
@pytest.mark.long
def test_loss_order_queues_and_small_packets() -> None:
    link = Link(loss=0.05, delay_ms=10, reorder=0.05)
    port = Port(up_mbit=50, queue_ms=50)
    with Lab(Network(hosts=2, link=link, port=port)) as lab:
        ends = [start(lab, host, "--budget", "16", "--idle", "0") for host in range(2)]
        (checks, options), _ = map(answer, ends)
    assert options == {}
    assert float(checks["round trip"]["found"].split()[0]) >= 20
    for way in ("to", "from"):
        found = {kind: checks[f"{way} 10.77.0.2: {kind}"]["found"] for kind in ("loss", "rate")}
        assert 2 < float(found["loss"].partition("%")[0]) < 9, found
        assert 35 < float(found["rate"].partition(" Mbit/s behind a queue")[0]) < 55, found


@needs_lab
@pytest.mark.long
def test_a_path_that_takes_smaller_packets_than_its_interfaces() -> None:
    # A bucket smaller than a packet never lets it go.
    small = "tc qdisc replace dev eth0 root tbf rate 100mbit burst 1314 latency 50ms"
    with Lab(Network(hosts=2)) as lab:
        assert lab.start(0, ["sh", "-ec", small]).wait(30) == 0
        ends = [start(lab, host, "--budget", "1", "--idle", "0") for host in range(2)]
        (first, options), (second, _) = map(answer, ends)
    assert options["LOSSYCOLL_MTU"] == "1300"
    for checks, name in ((first, "to 10.77.0.2"), (second, "from 10.77.0.1")):
        assert checks[f"{name}: packet size"]["status"] == "warn"
        assert "1300 bytes pass, though" in checks[f"{name}: packet size"]["found"]
    assert first["from 10.77.0.2: packet size"]["status"] == "ok"

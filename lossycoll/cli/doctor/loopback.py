"""Self-tests: how fast packets go by loopback and in shared memory, and are sealed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options

from .checks import Finding, Findings, Severity, effective_options, warn_unless

if TYPE_CHECKING:
    from lossycoll.runtime.engine.binding import EngineGroup

SECONDS = 0.3
DATAGRAM = 8192
RANKS = 2
ADDRESS = "127.0.0.1"
PAYLOAD = 1400  # fits every interface's packets
ELEMENTS = 1 << 18
SESSION = 0x10551C0
TIMEOUT = 10.0


def udp_loopback() -> str:
    """One datagram at a time, there and read at once: the bare sockets, without the engine."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind((ADDRESS, 0))
        receiver.settimeout(1.0)
        sender.connect(receiver.getsockname())
        payload = bytes(range(256)) * (DATAGRAM // 256)
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            sender.send(payload)
            if receiver.recv(DATAGRAM + 1) != payload:
                raise RuntimeError(f"datagram {count} arrived with other contents")
            count += 1
    rate = count * DATAGRAM / elapsed / 1e9
    return f"{count} datagrams of {DATAGRAM} bytes, none lost, {rate:.2f} GB/s"


def two_engines(*, shared: bool) -> str:
    """Two engines of this process all-reduce with each other, by UDP or through memory that each
    can read; the sum is checked."""
    import numpy as np

    from lossycoll.plan import Delivery, hierarchical
    from lossycoll.runtime.engine.binding import DType, EngineCall

    given = [np.arange(ELEMENTS, dtype=np.float32) % 1000 + rank for rank in range(RANKS)]
    wanted = given[0] + given[1]
    missing = operations = 0
    plans = [hierarchical.all_reduce(RANKS, rank, ELEMENTS, PAYLOAD // 4) for rank in range(RANKS)]
    calls = [
        EngineCall.of(plan).given(
            dtype=DType.F32,
            scale=float(RANKS),
            signature=plan.signature,
            timeout=TIMEOUT,
            delivery=Delivery(),
        )
        for plan in plans
    ]
    with _engines(shared=shared) as engines:
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            tensors = [values.copy() for values in given]
            tickets = [
                engine.submit(call, tensor.ctypes.data, tensor.ctypes.data)
                for engine, call, tensor in zip(engines, calls, tensors, strict=True)
            ]
            missing += sum(map(_finish, engines, tickets))
            if not missing and not all(np.array_equal(tensor, wanted) for tensor in tensors):
                raise RuntimeError("two engines all-reduced to a wrong sum")
            operations += 1
        active = "" if shared else f" ({','.join(engines[0].link().active) or 'none'})"
    rate = operations * ELEMENTS * 4 / elapsed / 1e9
    return f"{operations} all-reduces of 1 MiB, {missing} packets lost, {rate:.2f} GB/s{active}"


@contextlib.contextmanager
def _engines(*, shared: bool) -> Iterator[list[EngineGroup]]:
    """One per rank, connected, and closed at the end of the block."""
    from lossycoll.runtime.engine.binding import EngineGroup
    from lossycoll.runtime.engine.host import Host

    options = Options()  # the defaults: what the environment injects is not the network's fault
    with contextlib.ExitStack() as undo:
        hosts = []
        for rank in range(RANKS):
            host = Host(rank, RANKS, ADDRESS, payload_bytes=PAYLOAD, options=options)
            undo.callback(host.close)
            hosts.append(host)
        peers = [(ADDRESS, host.link().port) for host in hosts]
        memory = [host.share(range(RANKS)) for host in hosts] if shared else []
        engines = []
        for rank, host in enumerate(hosts):
            others = {other: pair for other, pair in enumerate(memory) if other != rank}
            host.start(SESSION, peers, shared=others)
            engine = EngineGroup(host, rank, RANKS, number=1, fault_group=0, options=options)
            undo.callback(engine.close)
            engines.append(engine)
        yield engines


def _finish(engine: EngineGroup, ticket: int) -> int:
    """Waits for an operation; returns how many packets it missed, or raises why it failed."""
    from lossycoll.runtime.engine.failures import Code

    until = time.monotonic() + TIMEOUT
    while (code := engine.wait(ticket, 0.1)) == Code.PENDING:
        if time.monotonic() > until:
            raise RuntimeError(f"two engines did not finish an all-reduce in {TIMEOUT:g} s")
    report, failure = engine.result(ticket)
    engine.release(ticket)
    if code < 0:
        raise RuntimeError(f"an all-reduce between two engines failed: {failure}")
    return report.packets_missing


SPEED_BYTES = 65536
SPEED_SECONDS = 0.05
SLOW_GB_S = 0.5
AES_FLAGS, GCM_FLAGS = ("vaes", "aes"), ("vpclmulqdq", "pclmulqdq", "pmull")
"""Names in /proc/cpuinfo, the best first."""


def sealing() -> Findings:
    """The library, its speed, and whether the secret can be used, if one is set."""
    from lossycoll.runtime.keys.aead import CIPHERS, has_cipher, library
    from lossycoll.runtime.keys.secret import find_secret

    options = effective_options()
    if options is None:
        return
    try:
        secret = find_secret()
        version, why = library(options.libcrypto)
    except OptionError as error:
        yield Finding("secret", "can't be used", Severity.FAIL, str(error))
        return
    is_set = "no secret is set"
    if secret is not None:
        is_set = f"a secret is set: {options.seal} by {options.cipher}"
    if why:
        advice = "install OpenSSL's libcrypto: libssl3 (Debian, Ubuntu) or openssl-libs (Fedora)"
        severity = Severity.WARN if secret is None else Severity.FAIL
        yield Finding("sealing", f"not possible ({why}); {is_set}", severity, advice)
        return
    speeds = {cipher: _gigabytes_per_second(cipher) for cipher in CIPHERS if has_cipher(cipher)}
    found = ", ".join(f"{cipher} {speed:.1f} GB/s" for cipher, speed in speeds.items())
    yield warn_unless(
        max(speeds.values()) >= SLOW_GB_S,
        "sealing",
        f"{version}: {found}; {_instructions()}; {is_set}",
        "sealing will be the limit here; try cipher=chacha20-poly1305 where that is quicker",
    )


def _gigabytes_per_second(cipher: str) -> float:
    from lossycoll.runtime.keys.aead import seal

    text, key = bytes(SPEED_BYTES), bytes(32)
    sealed, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < SPEED_SECONDS:
        seal(key, sealed.to_bytes(12, "big"), text, cipher=cipher)
        sealed += 1
    return sealed * SPEED_BYTES / took / 1e9


def _instructions() -> str:
    """Instructions for AES and for GCM's tag that the processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    found = (next(filter(flags.__contains__, known), "") for known in (AES_FLAGS, GCM_FLAGS))
    return f"the processor has {' and '.join(filter(None, found)) or 'no AES instructions'}"


def loopback() -> Findings:
    firewall = "a firewall on the loopback interface? see iptables -S and nft list ruleset"
    slower = "ranks of this machine use UDP among themselves, which is slower"
    tests = (
        ("UDP over loopback", udp_loopback, Severity.FAIL, firewall),
        ("engine over loopback", partial(two_engines, shared=False), Severity.FAIL, firewall),
        ("engine in shared memory", partial(two_engines, shared=True), Severity.WARN, slower),
    )
    for name, test, otherwise, advice in tests:
        try:
            yield Finding(name, test())
        except ImportError:
            continue  # the native engine does not load, which has its own line
        except (OSError, RuntimeError) as error:
            yield Finding(name, str(error), otherwise, advice)

"""A machine with RDMA that isn't there: a libibverbs of the tests' own, its devices in sysfs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lossycoll.runtime.engine.verbs_port import VerbsAddress, VerbsPort
from lossycoll.runtime.keys.secret import Secret

from .network import SESSION, Network

HERE = Path(__file__).resolve().parents[1] / "native"
_FOLDER = "FAKE_VERBS_SYSFS"


@cache
def library() -> str:
    """The path of the fake libibverbs (tests/native/fake_verbs.c), built once."""
    built = Path(tempfile.mkdtemp(prefix="lossycoll-verbs-")) / "fake_verbs.so"
    flags = ["-std=c11", "-O2", "-pthread", "-fPIC", "-shared", f"-I{HERE.parents[1] / 'native'}"]
    subprocess.run(["cc", *flags, HERE / "fake_verbs.c", "-o", built], check=True, timeout=60)
    return str(built)


def drop_library() -> None:
    """Removes what :func:`library` built, if it did."""
    if library.cache_info().currsize:
        shutil.rmtree(Path(library()).parent)
        library.cache_clear()


def write_port(
    root: Path,
    device: str = "fake0",
    number: int = 1,
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    gids: dict[int, tuple[str, str, str]] | None = None,
) -> Path:
    """A port as sysfs shows it; returns its folder.

    ``gids``: (address, kind, interface) by index; None: as the fake library's devices have them.
    """
    folder = root / device / "ports" / str(number)
    usual = {0: ("fe80::1", "IB/RoCE v1", "lo"), 1: ("::ffff:127.0.0.1", "RoCE v2", "lo")}
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "hw_counters"):
        (folder / part).mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{layer}\n")
    for index, (address, kind, interface) in (usual if gids is None else gids).items():
        (folder / "gids" / str(index)).write_text(f"{address}\n")
        (folder / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        (folder / "gid_attrs" / "ndevs" / str(index)).write_text(f"{interface}\n")
    return folder


def environment(root: Path) -> dict[str, str]:
    """Of ranks that shall find the devices below ``root``, and call :func:`show_devices` first."""
    return {_FOLDER: str(root), "LOSSYCOLL_LIBIBVERBS": library()}


def show_devices() -> None:
    """In a rank: sysfs is that of its environment."""
    from lossycoll.runtime.net import rdma_ports

    rdma_ports.ROOT = Path(os.environ[_FOLDER])  # type: ignore[misc]


def sent() -> int:
    """Datagrams that this process has sent by RDMA."""
    path = os.environ.get("LOSSYCOLL_LIBIBVERBS", "")
    return int(ctypes.CDLL(path).fake_verbs_sent()) if os.path.exists(path) else 0


class VerbsNetwork(Network):
    """Engines in one process that reach each other by RDMA alone.

    Args:
        world: Ranks.
        payload_bytes: As of all networks.
        secret: Seals what they send; None: nothing is sealed.
        options: The engines'.
    """

    def __init__(
        self, world: int, payload_bytes: int = 4032, secret: Secret | None = None, **options: Any
    ) -> None:
        self._secret = secret
        self.ports = [VerbsPort("fake0", 1, 1, library=library()) for _ in range(world)]
        super().__init__(world, payload_bytes, **options)

    def start(self, addresses: list[tuple[str, int]]) -> None:
        """As of all networks."""
        for rank, host in enumerate(self.hosts):
            host.take_port(self.ports[rank])
            if self._secret is not None:
                keys = self._secret.path_secrets("a meeting", rank, self.world)
                host.seal(keys, self._secret.filter("a meeting"))
            others = {peer: port.address for peer, port in enumerate(self.ports) if peer != rank}
            host.start(SESSION, addresses, verbs=others)


class StrangersQueuePair:
    """What can send datagrams to a queue pair of the fake library, as anybody it likes to be."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> StrangersQueuePair:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def throw(
        self,
        at: VerbsAddress,
        datagram: bytes,
        *,
        queue_pair: int,
        gid: str,
        key: int | None = None,
    ) -> None:
        """``queue_pair`` and ``gid``: where it seems to come from. ``key``: None: the right one."""
        head = struct.pack("<II", queue_pair, at.key if key is None else key) + bytes.fromhex(gid)
        self._socket.sendto(head + datagram, f"\0lossycoll-verbs-{at.queue_pair:06x}".encode())


def open_devices() -> int:
    """Devices that this process has open."""
    path = os.environ.get("LOSSYCOLL_LIBIBVERBS", "")
    return int(ctypes.CDLL(path).fake_verbs_open()) if os.path.exists(path) else 0


def library_sent() -> int:
    """Datagrams that this process has sent by the library that the tests have built."""
    return int(ctypes.CDLL(library()).fake_verbs_sent())


@contextlib.contextmanager
def losing(share: float) -> Iterator[None]:
    """Of all that this process sends by RDMA, a share vanishes on the way."""
    lose = ctypes.CDLL(library()).fake_verbs_lose
    lose.argtypes = [ctypes.c_double]
    lose(share)
    try:
        yield
    finally:
        lose(0.0)

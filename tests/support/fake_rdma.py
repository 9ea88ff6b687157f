"""A machine with RDMA that isn't there: a libibverbs of the tests' own, its devices in sysfs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

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

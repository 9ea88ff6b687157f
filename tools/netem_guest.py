#!/usr/bin/env python3
"""Runs a command under a kernel that has netem, where this machine's has not.

    python tools/netem_guest.py [--cache FOLDER] [-- COMMAND...]

boots Debian's stock kernel in QEMU, without KVM, on this machine's own file system: what the
command writes is lost. Without a command it checks the laboratory's backend netem, and tools/netem.
Needs Debian, root and ``apt-get install qemu-system-x86 busybox-static cpio kmod``; the kernel's
package is fetched and unpacked into the cache, never installed. Everything is some 20 times slower
in there.
"""

from __future__ import annotations

import argparse
import ctypes
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
NEEDED: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
}
"""Programs without which there is no guest, and Debian's packages that have them."""
LABORATORY: Final = {"ip": "iproute2", "tc": "iproute2", "ethtool": "ethtool"}
"""What the laboratory's backend runs in the guest, which has this machine's programs."""
FIRST: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""Modules for the root file system; the others are loaded when it is there."""
THEN: Final = (
    *("veth", "ifb", "tun", "bridge", "sch_netem", "sch_htb", "sch_tbf", "sch_ingress"),
    *("cls_u32", "cls_matchall", "act_mirred", "nf_tables", "nft_numgen", "nf_tables_netdev"),
)
UNPACKED: Final = (
    *("/boot/vmlinuz", "/modules.", "/lib/", "/crypto/", "/drivers/virtio/", "/drivers/net/"),
    *("/fs/9p/", "/fs/netfs/", "/fs/fscache/", "/fs/overlayfs/", "/net/9p/", "/net/802/"),
    *("/net/llc/", "/net/bridge/", "/net/sched/", "/net/netfilter/"),
)
CACHE: Final = ROOT / "build" / "netem_guest"
SECONDS: Final = 1200
FASTER: Final = "mitigations=off nokaslr no_timer_check tsc=reliable random.trust_cpu=on"
"""For the kernel. On a busy machine its check of the timer would fail, and it panics then."""
FAILED: Final = 125
"""The status when the guest ended before its command did."""

INIT: Final = """#!/bin/sh
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in $(cat /first); do insmod /modules/$m; done
share=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $share,cache=loose,ro machine /machine
mount -t tmpfs none /over; mkdir /over/up /over/work
mount -t overlay -o lowerdir=/machine,upperdir=/over/up,workdir=/over/work none /root
mkdir -p /root/mnt/out; mount -t 9p -o $share,cache=none out /root/mnt/out
for m in $(cat /then); do insmod /modules/$m; done
for d in proc sys dev; do mount -o bind /$d /root/$d; done
mkdir -p /root/dev/net /root/dev/shm; mount -t tmpfs none /root/dev/shm
mount -t tmpfs none /root/run
chroot /root /bin/sh /mnt/out/job > /dev/ttyS0 2>&1
echo $? > /root/mnt/out/status
busybox poweroff -f
"""

CHECK: Final = """
lab="{python} -m lossycoll.cli lab"
back=1-0:loss=0.02,burst=1
$lab verify --backend netem --mbit 20 --loss 0.05 --burst 4 --delay-ms 10 --link $back
bad=$?
$lab verify --backend netem --mbit 20 --up-mbit 100 --down-mbit 100 --queue-ms 50
bad=$((bad + $?))
$lab --backend netem -- sh -c 'echo $RANK of $WORLD_SIZE; [ $RANK = 0 ] || {tool}'
bad=$((bad + $?))
exit $bad
"""
TOOL: Final = (
    "{python} -m tools.netem apply eth0 --loss 0.1 --delay-ms 10 --yes && "
    "{python} -m tools.netem show eth0 && {python} -m tools.netem clear eth0 --yes && "
    "tc qdisc show dev eth0"
)


@dataclass(frozen=True)
class Extras:
    """What a guest has besides what every guest has."""

    modules: tuple[str, ...] = ()  # of the kernel, to be loaded with what they need
    unpacked: tuple[str, ...] = ()  # parts of names of the kernel's files, among which those are
    processors: int = 1  # how many it has


NOTHING: Final = Extras()


def say(*parts: object) -> None:
    print("netem_guest:", *parts, flush=True)


def capture(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kernel(cache: Path, extras: Extras = NOTHING) -> tuple[Path, str]:
    """The folder of an unpacked kernel, and its version."""
    depends = capture("apt-cache", "depends", "linux-image-amd64")
    package = next(
        word for word in depends.split() if word.startswith("linux-image-") and word[12].isdigit()
    )
    version = package.removeprefix("linux-image-")
    folder = cache / version
    listed = folder / "unpacked"
    # A folder without the list is of a time when there were no extras.
    before = listed.read_text().split() if listed.exists() else UNPACKED
    if not (folder / "boot").exists() or not set(extras.unpacked) <= set(before):
        folder.mkdir(parents=True, exist_ok=True)
        say("fetching", package)
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["apt-get", "download", "-q", package], cwd=place, check=True)
            (archive,) = Path(place).glob("*.deb")
            parts = sorted({*UNPACKED, *before, *extras.unpacked})
            unpack(archive, folder, parts)
        subprocess.run(["depmod", "-b", folder, version], check=True, stderr=subprocess.DEVNULL)
        listed.write_text("\n".join(parts))
    return folder, version


def unpack(archive: Path, folder: Path, parts: Sequence[str]) -> None:
    """Only what the guest may need: the whole is some 300 MB."""
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as source,
        tarfile.open(fileobj=source.stdout, mode="r|") as members,
    ):
        for member in members:
            if member.isfile() and any(part in member.name for part in parts):
                members.extract(member, folder)


def modules(folder: Path, version: str, names: Sequence[str], into: Path) -> list[str]:
    """Copies modules and what they need; returns their file names, in the order to load them."""
    order: list[str] = []
    for name in names:
        steps = subprocess.run(
            ["modprobe", "-d", folder, "-S", version, "--show-depends", name],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for line in steps.splitlines():
            verb, path, *_ = [*line.split(), "", ""]  # the rest are parameters
            source = Path(path)
            target = source.name.removesuffix(".xz")
            if verb != "insmod" or target in order:
                continue
            order.append(target)
            data = source.read_bytes()
            (into / target).write_bytes(lzma.decompress(data) if source.suffix == ".xz" else data)
    return order


def initial(folder: Path, version: str, place: Path, extras: Extras = NOTHING) -> Path:
    """The initial file system: busybox, modules, and what to do."""
    tree = place / "tree"
    for name in ("bin", "modules", "proc", "sys", "dev", "machine", "over", "root"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "busybox", tree / "bin" / "busybox")
    for name in ("sh", "mount", "mkdir", "insmod", "cat", "chroot"):
        (tree / "bin" / name).symlink_to("busybox")
    first = modules(folder, version, FIRST, tree / "modules")
    later = modules(folder, version, (*THEN, *extras.modules), tree / "modules")
    then = [m for m in later if m not in first]
    (tree / "first").write_text("\n".join(first))
    (tree / "then").write_text("\n".join(then))
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    image = place / "initial.cpio"
    with image.open("wb") as out:
        names = subprocess.Popen(["find", "."], cwd=tree, stdout=subprocess.PIPE)
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            cwd=tree,
            stdin=names.stdout,
            stdout=out,
            check=True,
        )
        names.wait()
    return image


def boot(image: Path, vmlinuz: Path, out: Path, seconds: float, processors: int = 1) -> int:
    """Runs the guest to its end, or for so long; returns the status of its job."""
    share = "security_model=none,multidevs=remap"
    arguments = [
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "3G"),
        *("-smp", str(processors)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(vmlinuz), "-initrd", str(image), "-device", "virtio-rng-pci"),
        *("-append", f"console=ttyS0 quiet panic=-1 {FASTER}"),
        *("-virtfs", f"local,path=/,mount_tag=machine,readonly=on,{share}"),
        *("-virtfs", f"local,path={out},mount_tag=out,{share}"),
    ]
    command = ["qemu-system-x86_64", *arguments]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
            preexec_fn=_end_with_parent,
        )
    except subprocess.TimeoutExpired:
        say(f"the guest was ended after {seconds:g} s")
    status = out / "status"
    return int(status.read_text()) if status.exists() else FAILED


def _end_with_parent() -> None:
    """A guest that nobody waits for any more would go on for good."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def lacking(more: Mapping[str, str] = MappingProxyType({})) -> str:
    """What this machine lacks for a guest, as a sentence; empty if it has it all. ``more``: further
    programs, by the package that has them."""
    packages = {name: package for name, package in {**NEEDED, **more}.items() if not which(name)}
    root = [] if os.geteuid() == 0 else ["root"]
    if not packages:
        return "it needs root" if root else ""
    install = " ".join(sorted({*packages.values()}))
    return f"it needs {', '.join([*root, *packages])}: apt-get install {install}"


def run(
    job: str, cache: Path, place: Path, seconds: float, extras: Extras = NOTHING
) -> tuple[str, int]:
    """Runs a shell script in a guest, in the repository's folder; the guest's /mnt/out is
    ``place / "out"``, and gets what it says as "log". Returns the kernel's version and the status.
    """
    folder, version = kernel(cache, extras)
    say("kernel", version)
    out = place / "out"
    out.mkdir(exist_ok=True)
    image = initial(folder, version, place, extras)
    lines = [
        "exec > /mnt/out/log 2>&1",
        "export PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8",
        f"export PYTHONPATH={shlex.quote(str(ROOT))} PYTHONDONTWRITEBYTECODE=1 COLUMNS=110",
        f"ip link set lo up; cd {shlex.quote(str(ROOT))} || exit 1",
        job,
    ]
    (out / "job").write_text("\n".join(lines) + "\n")
    vmlinuz = folder / "boot" / f"vmlinuz-{version}"
    return version, boot(image, vmlinuz, out, seconds, extras.processors)


def parser_of_check(prog: str, description: str, seconds: float) -> argparse.ArgumentParser:
    """The options of a program that runs a script in a guest, and judges what came of it."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="only print what would run")
    add("--cache", type=Path, default=CACHE)
    add("--seconds", type=float, default=seconds, help="end the guest then (%(default)s)")
    add("--keep", type=Path, help="write table and log to this file")
    return parser


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("words", nargs="*", metavar="COMMAND")
    chosen = parser.parse_args()
    if absent := lacking({} if chosen.words else LABORATORY):
        say(absent)
        return 2
    python = shlex.quote(sys.executable)
    check = CHECK.replace("{tool}", TOOL).replace("{python}", python)
    job = shlex.join(chosen.words) if chosen.words else check
    with tempfile.TemporaryDirectory() as place:
        _, status = run(job, chosen.cache, Path(place), SECONDS)
        log = Path(place) / "out" / "log"
        print(log.read_text() if log.exists() else "", end="")
    return status


if __name__ == "__main__":
    sys.exit(main())

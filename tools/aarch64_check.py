"""Tries a wheel for aarch64 in an emulator: the engine, the doctor, and two ranks of torch.

    python -m tools.aarch64_check dist/lossycoll-*aarch64.whl

Debian 12's arm64 files are unpacked, not installed: nothing of them runs but Python, under
qemu-user. Beside them pip unpacks torch and the wheel. Then, each with the emulated Python:

1. engine   tools/smoke_engine.py
2. doctor   lossycoll doctor
3. torch    tools/smoke_torch.py on 2 ranks with 5% of packets dropped; no torchrun, since an
            emulated program can't start another one

Needs root and ``apt-get install debootstrap qemu-user``. torch's build for aarch64 is one for CUDA:
2.7 GB to fetch, 5 GB unpacked. The files stay in the folder, and a second run uses them again.
Exit code 1: a step failed; 2: a program is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tools.check_versions import INSTALL_SECONDS, OK, SOURCE, TOOLS, StepFailed, call, variables

SUITE: Final = "bookworm"
PYTHON: Final = "3.11"  # the suite's
PACKAGES: Final = "python3,libstdc++6"
GLIBC: Final = 36  # the suite's minor version: wheels for older ones do
PROCESSOR: Final = "neoverse-n1"
CPUINFO: Final = """processor\t: {}
BogoMIPS\t: 100.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""What Linux says of that processor. qemu 7.2 shows the host's, at which torch's import crashes."""
MIDR: Final = "0x00000000414fd0c1\n"
SECONDS: Final = 3600.0
"""For a step. An emulator takes minutes to import torch."""


class Machine:
    """The emulated machine: a folder of files, and how a program of it is run."""

    def __init__(self, folder: Path, qemu: str) -> None:
        self._files = folder / SUITE
        self._packages = self._files / "usr/lib/python3/dist-packages"
        self._qemu = qemu

    def make(self, mirror: list[str]) -> None:
        """Unpack the suite's files, unless an earlier run has."""
        done = self._files / "unpacked"
        if done.exists():
            return
        shutil.rmtree(self._files, ignore_errors=True)
        options = ["--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}"]
        call(["debootstrap", *options, SUITE, self._files, *mirror], INSTALL_SECONDS)
        # debootstrap itself has unpacked only what its second stage needs.
        for package in sorted(self._files.glob("var/cache/apt/archives/*.deb")):
            call(["dpkg-deb", "-x", package, self._files])
        about = self._files / "sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
        about.parent.mkdir(parents=True)
        about.write_text(MIDR, encoding="ascii")
        cores = "".join(CPUINFO.format(core) for core in range(os.cpu_count() or 1))
        (self._files / "proc/cpuinfo").write_text(cores, encoding="ascii")
        done.touch()

    def install(self, torch: str, wheel: Path) -> None:
        """pip of this machine unpacks wheels for the other; torch only if it isn't there."""
        old = (self._packages / f"torch-{torch}.dist-info").exists()
        wanted = ["--no-deps", wheel] if old else [f"torch=={torch}", wheel]
        tags = ["manylinux2014_aarch64", *(f"manylinux_2_{n}_aarch64" for n in range(17, GLIBC))]
        call(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-compile"),
                *(f"--platform={tag}" for tag in tags),
                *(f"--python-version={PYTHON}", "--only-binary=:all:"),
                *("--target", self._packages, *wanted),
            ],
            INSTALL_SECONDS,
        )

    def command(self, *arguments: object) -> list[object]:
        python = self._files / "usr/bin" / f"python{PYTHON}"
        return [self._qemu, "-cpu", PROCESSOR, "-L", self._files, python, *arguments]

    def ranks(self, script: Path, world: int) -> str:
        """What the ranks print. Raises StepFailed."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        job |= {"LOSSYCOLL_INJECT": "loss=0.05,seed=7"}
        words = [str(word) for word in self.command(script)]
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
            ranks = []
            try:
                for rank in map(str, range(world)):
                    more = variables({**job, "RANK": rank, "LOCAL_RANK": rank})
                    ranks.append(subprocess.Popen(words, stdout=said, stderr=errors, env=more))
                end = time.monotonic() + SECONDS
                while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
                    time.sleep(0.1)
                codes = [rank.poll() for rank in ranks]
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            said.seek(0)
            errors.seek(0)
            if codes != [0] * world:
                raise StepFailed(f"the ranks ended with {codes}:\n{said.read()}{errors.read()}")
            return said.read().strip()


def check(machine: Machine, options: argparse.Namespace) -> None:
    def step(name: str, said: str) -> None:
        print(f"{name}: {OK}, {time.monotonic() - begin:.0f} s\n  {said}", flush=True)

    begin = time.monotonic()
    machine.make([options.mirror] if options.mirror else [])
    machine.install(options.torch, options.wheel.absolute())
    step("files", f"Debian {SUITE}, Python {PYTHON}, torch {options.torch}, {options.wheel.name}")
    begin = time.monotonic()
    step("engine", call(machine.command(TOOLS / "smoke_engine.py"), SECONDS).strip())
    begin = time.monotonic()
    doctor = call(machine.command("-P", "-m", "lossycoll.cli", "doctor"), SECONDS)
    step("doctor", doctor.strip().replace("\n", "\n  "))
    begin = time.monotonic()
    step("torch", machine.ranks(TOOLS / "smoke_torch.py", 2))


def main() -> int:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION")
    parser.add_argument("--mirror", help="of Debian, for debootstrap")
    parser.add_argument("--folder", type=Path, default=SOURCE / "build" / "aarch64")
    options = parser.parse_args()

    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    debootstrap = shutil.which("debootstrap")
    if qemu is None or debootstrap is None:
        print("needs qemu-aarch64 and debootstrap (Debian: qemu-user debootstrap)", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        check(Machine(options.folder.absolute(), qemu), options)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

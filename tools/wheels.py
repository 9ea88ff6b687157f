"""Builds what would be uploaded: an sdist, and from it one wheel per platform, each checked.

    python -m tools.wheels                          # into dist/, for the platforms of PLATFORMS
    python -m tools.wheels --musl --out /tmp/dist   # musllinux as well

Zig compiles (``pip install ziglang``), because it brings the C libraries of other systems: one
machine builds for every platform, without containers. Warnings are errors. Then each wheel is
checked. Its extensions are stripped, name no folder of this machine, need no library beyond the C
library's, and keep to the stable ABI (abi3audit) and to the platform's C library (auditwheel).
twine checks what an index would show. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from tools.check_versions import SOURCE, StepFailed, call

BUILD_SECONDS: Final = 1200.0
SYSTEM_LIBRARIES: Final = re.compile(
    r"lib(c|m|dl|pthread)\.so(\.\d+)?|ld-linux-(x86-64|aarch64)\.so\.\d|lib(c\.)?musl-\w+\.so\.1"
)
"""Libraries that every system of a platform has."""
LINK: Final = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)")
"""A link of Markdown that leads nowhere outside the repository."""


@dataclass(frozen=True)
class Platform:
    """Platform of a wheel: its tag, and what the compiler and Python call it."""

    tag: str
    triple: str
    """Zig's name, with the oldest C library that is supported."""
    machine: str
    flags: str = ""

    @property
    def glibc(self) -> tuple[int, int] | None:
        """The newest version of glibc that a wheel may need; None with musl."""
        found = re.match(r"manylinux_(\d+)_(\d+)_", self.tag)
        return (int(found[1]), int(found[2])) if found else None


PLATFORMS: Final = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "x86_64"),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "aarch64"),
)
MUSL: Final = (
    # musl's CMSG_NXTHDR compares sizes of different signs.
    Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "x86_64", "-Wno-sign-compare"),
    Platform("musllinux_1_2_aarch64", "aarch64-linux-musl", "aarch64", "-Wno-sign-compare"),
)
"""torch has no build for musl, so these wheels are built on demand only."""


def python_headers(folder: Path) -> Path:
    """A copy of CPython's headers without a distribution's redirection by processor.

    Debian's pyconfig.h includes one per processor, which another processor's compiler can't find.
    The stable ABI takes nothing from it but sizes of C types, the same on 64-bit Linux platforms.
    """
    shutil.copytree(sysconfig.get_path("include"), folder)
    shutil.copy(sysconfig.get_config_h_filename(), folder / "pyconfig.h")
    return folder


def build_sdist(out: Path, scratch: Path) -> Path:
    source = scratch / "source"
    for name in call(["git", "ls-files"], cwd=str(SOURCE)).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(SOURCE / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, source]
    call(command, BUILD_SECONDS)
    (made,) = out.glob("*.tar.gz")
    return made


def build_wheel(platform: Platform, sdist: Path, out: Path, scratch: Path) -> Path:
    source = scratch / platform.tag
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (tree,) = source.iterdir()
    headers = python_headers(source / "python")
    compiler = f"{shlex.quote(sys.executable)} -m ziglang cc -target {platform.triple}"
    cache = str(SOURCE / "build" / "zig")
    environment = {
        "CC": compiler,
        "CFLAGS": f"-I{headers}",
        "LDSHARED": f"{compiler} -shared -s",
        "LOSSYCOLL_WERROR": "1",
        # Clang would join a product and a sum, where gcc -std=c11 doesn't.
        "LOSSYCOLL_CFLAGS": f"-ffp-contract=off {platform.flags}".strip(),
        "SOURCE_DATE_EPOCH": str(int((tree / "pyproject.toml").stat().st_mtime)),
        "ZIG_GLOBAL_CACHE_DIR": cache,
        "ZIG_LOCAL_CACHE_DIR": cache,
        "_PYTHON_HOST_PLATFORM": f"linux-{platform.machine}",
    }
    option = f"--config-setting=--build-option=--plat-name={platform.tag}"
    call(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", option, "--outdir", out, tree],
        BUILD_SECONDS,
        more=environment,
    )
    (made,) = out.glob(f"*-{platform.tag}.whl")
    return made


def faults_of_extension(data: bytes, platform: Platform) -> Iterator[str]:
    """What is wrong with one extension, were it to be installed on the platform's machines."""
    elf = ELFFile(BytesIO(data))
    wanted = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[platform.machine]
    if elf["e_machine"] != wanted:
        yield f"is built for {elf['e_machine']}, not for {wanted}"
    for section in elf.iter_sections():
        if section.name == ".symtab" or section.name.startswith(".debug"):
            yield f"is not stripped: it has {section.name}"
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    yield f"looks for libraries in a folder ({tag.entry.d_tag})"
                # Not an attribute for mypy, where pyelftools is installed with its types.
                needed = str(getattr(tag, "needed", ""))
                if tag.entry.d_tag == "DT_NEEDED" and not SYSTEM_LIBRARIES.fullmatch(needed):
                    yield f"needs {needed}"
    for version in sorted(set(re.findall(rb"GLIBC_(\d+)\.(\d+)", data))):
        major, minor = int(version[0]), int(version[1])
        if platform.glibc is None or (major, minor) > platform.glibc:
            yield f"needs glibc {major}.{minor}"
    for folder in (str(SOURCE), tempfile.gettempdir(), sysconfig.get_path("include")):
        if f"{folder}/".encode() in data:
            yield f"names {folder}, a folder of the machine that built it"


def faults_of_wheel(wheel: Path, platform: Platform) -> Iterator[str]:
    """What is wrong with a wheel, by its contents alone."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    extensions = {name for name in files if name.endswith(".so")}
    if extensions != {f"lossycoll/{name}.abi3.so" for name in ("_lab", "_native", "_sim")}:
        yield f"{wheel.name} has the extensions {sorted(extensions)}"
    for name in sorted(extensions):
        for fault in faults_of_extension(files[name], platform):
            yield f"{wheel.name}: {name} {fault}"
    (about,) = (files[name] for name in files if name.endswith(".dist-info/METADATA"))
    for link in LINK.findall(str(message_from_bytes(about).get_payload())):
        yield f"{wheel.name}: the long description links to {link}, which an index hasn't got"


def audit(wheel: Path, platform: Platform) -> Iterator[str]:
    """What abi3audit and auditwheel find; auditwheel knows the C library of the machine only."""
    try:
        call([sys.executable, "-m", "abi3audit", "--strict", wheel])
        if platform.glibc is None:
            return
        shown = " ".join(call([sys.executable, "-m", "auditwheel", "show", wheel]).split())
    except StepFailed as error:
        yield str(error)
        return
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_', shown)
    if found is None or (int(found[1]), int(found[2])) > platform.glibc:
        yield f"auditwheel says of {wheel.name}: {shown}"


def build(out: Path, platforms: tuple[Platform, ...]) -> list[str]:
    """Build and check everything; return what is wrong."""
    out.mkdir(parents=True, exist_ok=True)
    if old := [path.name for path in (*out.glob("*.whl"), *out.glob("*.tar.gz"))]:
        return [f"{out} has packages already: {', '.join(sorted(old))}. Remove them first."]
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        sdist = build_sdist(out, Path(folder))
        print(f"{sdist.name}: {sdist.stat().st_size:,} bytes", flush=True)
        for platform in platforms:
            wheel = build_wheel(platform, sdist, out, Path(folder))
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
            faults += [*faults_of_wheel(wheel, platform), *audit(wheel, platform)]
    try:
        call([sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir())])
    except StepFailed as error:
        faults.append(str(error))
    return faults


def main() -> int:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=SOURCE / "dist", help="where packages go")
    parser.add_argument("--musl", action="store_true", help="build for musllinux as well")
    options = parser.parse_args()
    try:
        faults = build(options.out, PLATFORMS + (MUSL if options.musl else ()))
    except StepFailed as error:
        faults = [str(error)]
    print(*faults, sep="\n", file=sys.stderr)
    print("nothing wrong was found" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())

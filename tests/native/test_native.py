"""Runs the C tests of tests/native: plain, under ASan and UBSan, under TSan, the fuzzers, and
scenarios in virtual time.

A C compiler is a requirement of the project, so its absence is a failure and not a skip.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"

# They share what they build, and each uses both cores to build it.
# A compiler under load takes minutes for what it does in seconds on an idle machine.
pytestmark = [pytest.mark.xdist_group("native"), pytest.mark.timeout(900)]


def make(target: str, *variables: str, timeout: float = 840) -> None:
    done = subprocess.run(
        ["make", "-j2", "-C", str(HERE), target, *variables],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "target",
    [
        "fast",
        "fast-asan",
        "fast-tsan",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("test", "asan", "tsan")),
    ],
)
def test_make(target: str) -> None:
    make(target)


@pytest.mark.long
def test_aarch64_computes_the_same_bits() -> None:
    """NEON's kernels against the portable ones, and engines, by an emulator."""
    for tool, package in (
        ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        ("qemu-aarch64", "qemu-user"),
    ):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: {package})")
    make("arm")


@pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="needs musl-gcc (Debian: musl-tools)")
@pytest.mark.parametrize("target", ["musl-leaves", pytest.param("musl", marks=pytest.mark.long)])
def test_another_libc_does(target: str) -> None:
    """The sources are compiled with musl's headers, warnings as errors; the short suite runs the
    links alone, the long one engines too."""
    headers = HERE / "build" / "musl" / "include"
    make(target)
    line = ["musl-gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-pthread"]
    line += [f"-I{NATIVE}", f"-I{NATIVE / 'lab'}", "-idirafter", str(headers)]
    command = [*line, *sorted(map(str, NATIVE.rglob("*.c")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OLDEST_GCC = 11


def _compilers() -> list[str]:
    """The gcc and clang that this machine has, a name each, but for gcc older than those meant, and
    the one that all other tests are built by, with warnings as errors."""
    found = {}
    usual = Path(shutil.which("cc") or "cc").resolve()
    for folder in os.get_exec_path():
        for path in sorted(Path(folder).glob("*")):
            parts = re.fullmatch(r"(gcc|clang)(?:-(\d+))?", path.name)
            if parts and (parts[1] == "clang" or int(parts[2] or OLDEST_GCC) >= OLDEST_GCC):
                found.setdefault(path.resolve(), path.name)
    found.pop(usual, None)
    return list(found.values())


@pytest.mark.parametrize("compiler", _compilers())
def test_each_compiler_builds_the_native_code(compiler: str, tmp_path: Path) -> None:
    """gcc 11 and later, and clang: what is found here, and what CI installs (.ci/run). Vectors
    that they know by different names must give the same bytes, so one test of these runs."""
    options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"]
    options += [f"-I{NATIVE}", f"-I{NATIVE / 'lab'}"]
    program = tmp_path / "test_lowbit"
    lines = [
        ["-O3", "-fsyntax-only", *sorted(map(str, NATIVE.rglob("*.c")))],
        ["-O1", str(HERE / "test_lowbit.c"), str(NATIVE / "kernels.c"), str(NATIVE / "codec.c")],
    ]
    lines[1] += ["-o", str(program), "-lm"]
    for line in lines:
        command = [compiler, *options, *line]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    subprocess.run([program], check=True, stdout=subprocess.DEVNULL)


def test_a_big_endian_host_is_refused_by_name() -> None:
    order = ["-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    line = ["cc", "-std=c11", "-w", "-fsyntax-only", str(NATIVE / "lossycoll.h")]
    refused = subprocess.run([*line, *order], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "lossycoll needs a little-endian host" in refused.stderr
    assert subprocess.run(line, check=False).returncode == 0


def test_fuzz() -> None:
    make("fuzz", "FUZZ_SECONDS=1")


@pytest.mark.long
@pytest.mark.timeout(480)
def test_fuzz_for_long() -> None:
    make("fuzz", "FUZZ_SECONDS=60", timeout=400)


@pytest.mark.skipif(
    not Path("/usr/include/infiniband/verbs.h").exists(), reason="needs libibverbs-dev"
)
def test_our_declarations_of_libibverbs_are_its_own() -> None:
    make("verbs-layout")


def test_the_extension_is_imported_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from lossycoll._native import lib; print(lib.lc_header_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "48", done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_scenarios_for_long() -> None:
    make("sim", "SIM_SECONDS=60", timeout=280)


def test_the_engine_knows_nothing_of_python_or_torch() -> None:
    """native/build_cffi.py alone binds it to Python, by the sources' own declarations."""
    sources = list(NATIVE.rglob("*.[ch]"))
    assert len(sources) > 30
    own = {path.name for path in sources}
    for path in sources:
        for kind, name in re.findall(
            r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE
        ):
            if kind == '"':
                assert Path(name).name in own, f"{path.name} includes {name}, which isn't ours"
            else:
                assert not re.search(r"python|torch|aten|c10|cuda|numpy", name, re.IGNORECASE), (
                    f"{path.name} includes {name}"
                )

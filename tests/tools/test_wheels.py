"""Wheels that would be uploaded: built for other platforms by tools/wheels.py, and installed.

The short suite checks the checks, by extensions that are wrong on purpose.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
import tomllib

pytest.importorskip("elftools", reason="requirements-release.txt is not installed")
from tools.wheels import LINK, MUSL, PLATFORMS, faults_of_extension, faults_of_wheel

ROOT = Path(__file__).resolve().parents[2]
HERE = PLATFORMS[0]


def compiled(folder: Path, *flags: str, source: str = "int lc_one(void) { return 1; }\n") -> bytes:
    (folder / "one.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "one.c", "-o", "one.so", *flags]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return (folder / "one.so").read_bytes()


@pytest.mark.skipif(os.uname().machine != HERE.machine, reason="cc makes another processor's code")
def test_faults_of_an_extension_are_found(tmp_path: Path) -> None:
    assert not list(faults_of_extension(compiled(tmp_path, "-s"), HERE))
    (symbols,) = faults_of_extension(compiled(tmp_path), HERE)
    assert ".symtab" in symbols
    assert any(".debug" in fault for fault in faults_of_extension(compiled(tmp_path, "-g"), HERE))
    (path,) = faults_of_extension(compiled(tmp_path, "-s", "-Wl,-rpath,/opt"), HERE)
    assert "DT_RUNPATH" in path or "DT_RPATH" in path
    (machine,) = faults_of_extension(compiled(tmp_path, "-s"), PLATFORMS[1])
    assert "EM_X86_64" in machine
    homes = faults_of_extension(
        compiled(tmp_path, "-s", source=f'const char *lc_home(void) {{ return "{ROOT}/x"; }}\n'),
        HERE,
    )
    assert any(str(ROOT) in home for home in homes)
    calls = "#include <stdlib.h>\nvoid *lc_some(void) { return malloc(8); }\n"
    (glibc,) = faults_of_extension(compiled(tmp_path, "-s", source=calls), MUSL[0])
    assert "needs glibc 2." in glibc


def test_faults_of_a_wheel_are_found(tmp_path: Path) -> None:
    wheel = tmp_path / "lossycoll-1-cp310-abi3-x.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("lossycoll-1.dist-info/METADATA", "Name: lossycoll\n\n[a](docs/a.md)\n")
    extensions, link = faults_of_wheel(wheel, HERE)
    assert "has the extensions []" in extensions
    assert "docs/a.md" in link


def test_the_long_description_has_no_link_into_the_repository() -> None:
    text = runpy.run_path(str(ROOT / "setup.py"), run_name="not a build")["long_description"]()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert LINK.search(readme)
    assert not LINK.search(text)
    assert "![" not in text
    headings = re.compile(r"^#.*$", re.MULTILINE)
    assert headings.findall(text) == headings.findall(readme)


def test_what_an_index_shows_is_whole() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["description"]) <= 100
    assert len(project["keywords"]) >= 5
    assert all(url.startswith("https://") for url in project.get("urls", {}).values())


def run(*command: object, **more: object) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_wheels_build_pass_their_audit_and_work_without_a_compiler(tmp_path: Path) -> None:
    for package in ("ziglang", "abi3audit", "auditwheel", "twine"):
        pytest.importorskip(package, reason="requirements-release.txt is not installed")
    out = tmp_path / "dist"
    said = run(sys.executable, "-m", "tools.wheels", "--out", out, cwd=ROOT, timeout=1500).stdout
    assert said.endswith("nothing wrong was found\n")
    wheels = {path.name.split("-")[-1].removesuffix(".whl"): path for path in out.glob("*.whl")}
    assert wheels.keys() == {platform.tag for platform in PLATFORMS}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lossycoll").rglob("*.py")}
    for wheel in wheels.values():
        with ZipFile(wheel) as archive:
            assert modules <= set(archive.namelist())

    if HERE.tag in wheels and os.uname().machine == HERE.machine:
        report = tmp_path / "report.json"
        check = (ROOT / "tools" / "check_versions.py", "--wheel", wheels[HERE.tag])
        pair = f"{sys.executable}:installed"
        run(sys.executable, *check, "--no-isolation", "--json", report, pair, timeout=600)
        (result,) = json.loads(report.read_text())["results"]
        assert result["steps"] == {"build": "-", "engine": "ok", "torch": "ok", "removal": "ok"}
        assert any(re.search(r"[1-9]\d* packets lost", line) for line in result["said"])

    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    # What is built is there already; that a build from the sdist works, the wheels have shown.
    for path in (ROOT / "lossycoll").glob("_*.so"):
        shutil.copy(path, tree / "lossycoll")
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not long")
    chosen = ("tests/plan", "tests/options", "tests/repository", "tests/tools")
    tests = run(*command, *chosen, cwd=tree, timeout=1500, env=environment)
    assert re.search(r"\d+ passed", tests.stdout)

"""What users install: sdist and wheel are built, and the wheel works away from the source tree.

tools/check_versions.py does the building and the installing, here for the Python of the tests. It
borrows the packages of this environment, so nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import tomllib

import lossycoll

ROOT = Path(__file__).resolve().parents[2]
NO_BUILD = {(10, 15)}
"""(Python 3.x, torch 2.x): pairs for which torch publishes nothing."""
CHECK = ROOT / "tools" / "check_versions.py"

# The first test waits for the build and the installed package's own tests.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of sdist and wheel, and the only result."""
    folder = tmp_path_factory.mktemp("wheel")
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, CHECK, f"{sys.executable}:installed", "--no-isolation"),
            *("--out", folder, "--json", report),
        ],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(report.read_text())["results"]
    return folder / result["python"], result


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, object]) -> dict[str, bytes]:
    """The wheel's files by name."""
    (path,) = built[0].glob("*.whl")
    # One wheel for all Pythons: the extension keeps to the stable ABI.
    assert re.fullmatch(r"lossycoll-[\d.]+-cp310-abi3-linux_\w+\.whl", path.name)
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(files: dict[str, bytes]) -> Message:
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(files[name])


@pytest.mark.long
def test_the_installed_wheel_works_and_leaves_nothing(built: tuple[object, dict[str, Any]]) -> None:
    result = built[1]
    assert result["steps"] == dict.fromkeys(("build", "engine", "torch", "removal"), "ok")
    assert result["claimed"]
    assert result["python"] == ".".join(map(str, sys.version_info[:3]))
    assert any(re.search(r"[1-9]\d* packets lost", line) for line in result["said"])


@pytest.mark.long
def test_the_wheel_has_the_package_and_no_more(wheel: dict[str, bytes]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lossycoll").rglob("*.py")}
    inside = {name for name in wheel if ".dist-info/" not in name}
    built = {f"lossycoll/{name}.abi3.so" for name in ("_native", "_lab", "_sim")}
    assert inside == modules | built | {"lossycoll/py.typed"}


@pytest.mark.long
def test_the_wheel_says_what_it_is(wheel: dict[str, bytes]) -> None:
    about = metadata(wheel)
    assert about["Version"] == lossycoll.__version__
    assert about["Requires-Python"] == ">=3.10"
    assert about["License-Expression"] == "BSD-3-Clause"
    (licence,) = (name for name in wheel if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel[licence] == (ROOT / "LICENSE").read_bytes()

    (name,) = (name for name in wheel if name.endswith(".dist-info/entry_points.txt"))
    entries = ConfigParser()
    entries.read_string(wheel[name].decode())
    assert {section: dict(entries[section]) for section in entries.sections()} == {
        "console_scripts": {"lossycoll": "lossycoll.cli.main:main"},
        "torch.backends": {"lossycoll": "lossycoll._autoload:register"},
        "torch.distributed.backends": {"lossy": "lossycoll._autoload:register"},
    }


def must_be_buildable(sdist: Path) -> None:
    """Asserts that it has what a build and the site need, and nothing that was built."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    native = ROOT / "native"
    needed = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.c", "*.h", "*.py")
        for path in native.rglob(pattern)
    }
    assert {"native/lossycoll.h", "native/lab/lab.h", "native/sim/sim.h"} <= needed
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= inside
    assert not any(name.endswith((".so", ".o", ".pyc")) for name in inside)


@pytest.mark.long
def test_the_sdist_has_what_a_build_needs(built: tuple[Path, object]) -> None:
    (path,) = built[0].glob("*.tar.gz")
    must_be_buildable(path)


def test_an_sdist_by_itself_has_what_a_build_needs(tmp_path: Path) -> None:
    """The short suite's share of the above: nothing is compiled or installed."""
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "build")
    for folder in ("lossycoll", "native", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=unwanted)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    must_be_buildable(path)


def test_what_is_claimed_is_in_the_table_of_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = {int(c.removeprefix(prefix)) for c in project["classifiers"] if c.startswith(prefix)}
    (torch,) = (d for d in project["dependencies"] if d.startswith("torch"))
    low, high = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())  # type: ignore[union-attr]

    rows = re.findall(
        r"^\| 3\.(\d+)\.\d+ \| 2\.(\d+)\.\S+ \| ok \| ok \| ok \|$",
        (ROOT / "docs" / "versions.md").read_text(),
        re.MULTILINE,
    )
    tested = {(int(python), int(torch)) for python, torch in rows}
    assert {python for python, _ in tested} == minors
    assert {torch for _, torch in tested} == set(range(low, high))
    oldest, newest = min(minors), max(minors)
    for python in (oldest, newest):
        offered = [minor for minor in range(low, high) if (python, minor) not in NO_BUILD]
        assert {(python, offered[0]), (python, offered[-1])} <= tested
    assert project["requires-python"] == f">=3.{oldest}"

"""What accompanies a release agrees with pyproject.toml, and passes its own linters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import lossycoll

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch"}
BIN = Path(sys.executable).parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def one(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def test_one_version_is_told_everywhere() -> None:
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    told = {
        "lossycoll.__version__": lossycoll.__version__,
        "native/api.c": one(r'^    return "([\d.]+)";$', read("native/api.c")),
        "CITATION.cff": one(r"^version: (\S+)$", read("CITATION.cff")),
        "recipe.yaml": one(r"^  version: ([\d.]+)$", RECIPE.read_text(encoding="utf-8")),
        "CHANGELOG.md": newest[1],
    }
    assert told == dict.fromkeys(told, PROJECT["version"])


def test_the_recipe_requires_what_the_wheel_requires() -> None:
    recipe = RECIPE.read_text(encoding="utf-8")
    run = one(r"^  run:\n((?:    - .*\n)+)", recipe)
    wanted = {f"python {PROJECT['requires-python']}"}
    for requirement in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"(\w+)(.*)", requirement).groups()  # type: ignore[union-attr]
        wanted.add(f"{CONDA_NAMES.get(name, name)} {bounds}")
    assert {line.removeprefix("    - ") for line in run.splitlines()} == wanted
    for requirement in tomllib.loads(read("pyproject.toml"))["build-system"]["requires"]:
        assert f"    - {requirement.replace('>=', ' >=')}\n" in recipe
    (command,) = PROJECT["scripts"].items()
    assert f"      - {' = '.join(command)}\n" in recipe


def test_images_have_a_python_that_is_claimed() -> None:
    versions = re.findall(r"^FROM python:(3\.\d+)-", read("Dockerfile"), re.MULTILINE)
    assert len(versions) == 2
    assert len(set(versions)) == 1
    assert f"Programming Language :: Python :: {versions[0]}" in PROJECT["classifiers"]


def linted(*command: object) -> str:
    """What a linter of requirements-release.txt says; skips where it isn't installed."""
    program = shutil.which(str(command[0]), path=str(BIN))
    if program is None:
        pytest.skip(f"{command[0]} is not installed: requirements-release.txt")
    words = [program, *map(str, command[1:])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert json.loads(linted("hadolint", "--format", "json", "Dockerfile")) == []


@pytest.mark.long
def test_the_recipe_renders() -> None:
    build = pytest.importorskip("rattler_build", reason="requirements-release.txt isn't installed")
    recipe = build.Stage0Recipe.from_file(str(RECIPE))
    (variant,) = recipe.render(build.VariantConfig.from_yaml("c_stdlib: [sysroot]\n"))
    assert PROJECT["version"] in repr(variant)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pyright_knows_the_types_of_a_users_program(tmp_path: Path) -> None:
    program = ROOT / "tests" / "repository" / "typed_user.py"
    shutil.copy(program, tmp_path)
    (tmp_path / "wrong.py").write_text("import lossycoll\n\nlossycoll.stats().cals\n")
    config = {
        "include": ["."],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.10",
        "extraPaths": [str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checker = shutil.which("basedpyright", path=str(BIN))
    if checker is None:
        pytest.skip("basedpyright is not installed: requirements-release.txt")
    command = [checker, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=800
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [(Path(d["file"]).name, d["message"]) for d in found if d["severity"] == "error"]
    assert [name for name, _ in errors] == ["wrong.py"], errors
    assert "cals" in errors[0][1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pyright_knows_the_types_of_the_public_names(tmp_path: Path) -> None:
    """All but what torch's own classes leave open, and the member below a Swarm."""
    checker = shutil.which("basedpyright", path=str(BIN))
    if checker is None:
        pytest.skip("basedpyright is not installed: requirements-release.txt")
    command = [checker, "--verifytypes", "lossycoll", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    objects = (getattr(lossycoll, name) for name in lossycoll.__all__)
    homes = {
        f"{one.__module__}.{one.__qualname__}" for one in objects if hasattr(one, "__qualname__")
    }
    assert len(homes) > 40
    unknown = {}
    for symbol in json.loads(done.stdout)["typeCompleteness"]["symbols"]:
        name, said = symbol["name"], [one["message"] for one in symbol["diagnostics"]]
        public = name in homes or name.rpartition(".")[0] in homes
        excused = re.compile(r"metaclass|base class|RequeueSampler|SwarmMember")
        left = [text for text in said if not excused.search(text)]
        if public and "._" not in name and not symbol["isTypeKnown"] and left:
            unknown[name] = said
    assert unknown == {}

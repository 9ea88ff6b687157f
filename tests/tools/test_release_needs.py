"""What a release needs is named with its remedy, and has all that tests would skip for."""

from __future__ import annotations

import re
from pathlib import Path

from tools.release_needs import MODULES, PROGRAMS, missing

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_missing_is_named_with_its_remedy() -> None:
    assert list(missing(lambda _: True, lambda _: True)) == []
    without = list(missing(lambda name: name not in ("chromium", "qemu-aarch64"), lambda _: True))
    assert without == ["qemu-aarch64: apt install qemu-user"], "either browser does"
    (zig,) = missing(lambda _: True, lambda name: name != "ziglang")
    assert zig == "Python's ziglang: pip install -r requirements-release.txt"


def test_a_release_may_not_skip_for_a_package() -> None:
    """Packages of frameworks are excepted: `make test-frameworks` installs them."""
    skipped = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        skipped |= set(re.findall(r'importorskip\(\s*"(\w+)[."]', text))
    assert skipped - {"kubeflow_trainer_api", "torch"} <= MODULES.keys()
    programs = {name for names in PROGRAMS for name in names.split(" or ")}
    assert programs >= {"qemu-aarch64", "chromium", "hadolint", "basedpyright", "musl-gcc"}


def test_make_release_asks_first() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nrelease:")[2].partition("\n\n")[0]
    asks = recipe.index("tools.release_needs")
    assert asks < recipe.index("test-all") < recipe.index("wheels site")

"""The package says where each of its tensors lies: torch.set_default_device() is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).resolve().parents[2] / "lossycoll"
FACTORIES = {call.__name__ for call in _device_constructors()}
"""Names of the functions that torch gives the default device."""


def without_device(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call of a factory that takes the default device."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of, name = node.func.value, node.func.attr
        is_torchs = isinstance(of, ast.Name) and of.id == "torch" and name in FACTORIES
        if is_torchs and not any(given.arg in ("device", None) for given in node.keywords):
            yield node.lineno, name


def test_every_factory_is_told_its_device() -> None:
    assert {"empty", "zeros", "tensor", "arange", "randperm", "sparse_coo_tensor"} <= FACTORIES
    assert list(without_device("torch.zeros(3)\ntorch.zeros(3, device=x)")) == [(1, "zeros")]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: torch.{name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in without_device(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_no_factory_has_another_name_here() -> None:
    """The test above looks for them in torch alone."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                names = {alias.name for alias in node.names}
                assert not names & FACTORIES, f"{path} imports {names & FACTORIES}"
            if isinstance(node, ast.Import):
                renamed = [one.asname for one in node.names if one.name == "torch"]
                assert renamed in ([], [None]), f"{path} has torch as {renamed}"

"""Public names are documented: every parameter, result and error of theirs is in a docstring.

Public is what docs/api.md has: what users import from lossycoll, the process group that torch
calls, and what extensions use. Other docstrings say in a line or three what a reader needs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

import lossycoll
from lossycoll.backend.extensions import Extensions
from tools.api_page import BEYOND, attributes, function_of, is_property

EXCEPTIONS: dict[str, str] = {
    "Options": "its fields are the rows of docs/options.md",
}
"""Names whose docstring leaves something out, and why."""
SAID_ONCE = ("Endpoint",)
"""Classes whose own docstring says what arguments of several methods are, and what all return."""
NO_RESULT = ("None", "NoReturn", inspect.Signature.empty)


def members(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods that a class of ours defines or inherits from one of ours."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("lossycoll"):
            found |= vars(base)
    for member, value in found.items():
        function = function_of(value)
        shown = not member.startswith("_") or member == "__call__"
        # A function of another name is torch's.
        if shown and inspect.isfunction(function) and function.__name__ == member:
            yield f"{name}.{member}", value


def public() -> Iterator[tuple[str, Any]]:
    for name in lossycoll.__all__:
        thing = getattr(lossycoll, name)
        yield name, thing
        if inspect.isclass(thing):
            yield from members(name, thing)
    for modules in BEYOND.values():
        for origin, names in modules.items():
            for name in names:
                thing = getattr(importlib.import_module(origin), name)
                yield name, thing
                if inspect.isclass(thing):
                    yield from members(name, thing)


PUBLIC = dict(public())


def raises(function: Any) -> bool:
    """Whether there is a ``raise`` of an error in the function's own body."""
    ahead: list[ast.AST] = list(
        ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    )
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Raise) and node.exc:
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):  # not what it defines
            ahead += ast.iter_child_nodes(node)
    return False


def takes_what_torch_says(name: str) -> bool:
    """Whether a method is of torch's ProcessGroup, which documents its arguments."""
    of, _, member = name.partition(".")
    return of == "LossyProcessGroup" and bool(member) and member not in vars(Extensions)


def lacks(thing: Any, whole: str = "") -> list[str]:
    """What the docstring of a public thing should say and doesn't. ``whole``: its class's."""
    function = function_of(thing)
    text = inspect.getdoc(thing if is_property(thing) else function) or ""
    if inspect.isclass(thing) and "__init__" in vars(thing):
        text += "\n" + (inspect.getdoc(thing.__init__) or "")
    out = [] if text else ["a docstring"]
    if is_property(thing) or text.startswith("As :"):  # another one says it
        return out
    if dataclasses.is_dataclass(thing):
        text = "\n".join(inspect.getdoc(base) or "" for base in thing.__mro__)
        described = attributes(thing)
        return out + [
            f"field {field.name}"
            for field in dataclasses.fields(thing)
            if field.name not in described and not re.search(rf"^ +{field.name}: ", text, re.M)
        ]
    if inspect.isclass(thing) and issubclass(thing, tuple):
        described = text.partition("Attributes:")[2]
        fields = [name for name in thing._fields if not re.search(rf"^ +{name}: ", described, re.M)]
        return out + [f"field {name}" for name in fields]
    if inspect.isclass(thing) and issubclass(thing, BaseException | Enum):
        return out
    if getattr(thing, "_is_protocol", False):  # nobody makes one
        return out
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name not in {"self", "cls"}]
    arguments = text.partition("Args:")[2]
    out += [
        f"Args: {name}"
        for name in names
        if not re.search(rf"^ +\*?\*?{name}\b.*:", arguments, re.M) and f"``{name}``" not in whole
    ]
    result = signature.return_annotation
    if inspect.isfunction(function):
        # A line can say what a function without parameters returns.
        brief = not names and "\n" not in text
        said = brief or "returns" in whole or re.search(r"^(Returns|Yields):", text, re.M)
        if result not in NO_RESULT and not said:
            out.append("Returns:")
        if raises(function) and "Raises:" not in text:
            out.append("Raises:")
    return out


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in EXCEPTIONS])
def test_a_public_name_is_documented(name: str) -> None:
    of = name.partition(".")[0]
    missing = lacks(PUBLIC[name], inspect.getdoc(PUBLIC[of]) or "" if of in SAID_ONCE else "")
    if takes_what_torch_says(name):
        missing = [one for one in missing if one == "a docstring"]
    assert not missing, f"the docstring of {name} lacks {', '.join(missing)}"


def test_exceptions_are_still_needed() -> None:
    assert EXCEPTIONS.keys() <= PUBLIC.keys()
    for name, reason in EXCEPTIONS.items():
        print(f"{name}: {reason}")
        assert lacks(PUBLIC[name]), f"{name} needs no exception"

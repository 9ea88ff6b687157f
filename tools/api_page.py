"""docs/api.md, from the docstrings of the public names: ``python -m tools.api_page`` writes it.

``make docs`` does the same; tests/repository/test_api_page.py fails while the page differs.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import lossycoll

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD: Final = """\
# API

Look up a public name of `lossycoll`: its arguments, results and errors. The backend itself needs no
import: `torch.distributed.init_process_group("lossy")`. [guide.md](guide.md) says which part to use
when.

<!-- python -m tools.api_page writes this page from the docstrings -->
"""
GROUPS: Final = {
    "Training": (
        "DriftBound",
        "measure_drift",
        "Drift",
        "ShardedOptimizer",
        "ShardedStats",
        "DropCompute",
        "DropStep",
        "DropReport",
        "dispersing_hook",
        "wire_feedback_hook",
        "WireFeedbackState",
        "arc_topk_hook",
        "ARCTopKState",
    ),
    "Ranks that come back": ("ElasticWorld", "WorldChange", "ShardBackup", "torchft_process_group"),
    "Swarms": ("Swarm", "MoshpitAverager", "MoshpitSGD", "RoundReport", "CatchUpReport"),
    "Inference": ("wire_allreduce_",),
    "Options and scopes": ("Options", "lossy", "reliable"),
    "Stats": ("stats", "last_report", "group_stats", "Stats", "PeerStats", "Report"),
    "In torch's tools": ("export_chrome_trace", "debug_handlers", "stop_replacing"),
    "Hosts and sites": ("topology", "Topology"),
    "Keys": ("rekey",),
}
BEYOND: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Process group": {
        "lossycoll.backend.process_group": ("LossyProcessGroup",),
    },
    "Extensions": {
        "lossycoll.plan": ("register", "Algorithm"),
        "lossycoll.cli.demo.methods": ("Method",),
        "lossycoll.backend.description": ("Description", "CollectiveKind", "Submission"),
        "lossycoll.runtime.collectives.endpoint": ("Endpoint",),
    },
}
"""What isn't imported from ``lossycoll`` itself: what torch calls, and what extensions use."""
SECTIONS: Final = ("Args", "Attributes", "Returns", "Yields", "Raises")
WIDTH: Final = 88


def page() -> str:
    """The text of docs/api.md."""
    parts = [HEAD]
    errors = tuple(name for name in lossycoll.__all__ if name.endswith("Error"))
    errors += ("OperationTimeout",)
    for title, names in {**GROUPS, "Errors": tuple(sorted(errors))}.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(name, getattr(lossycoll, name))
    for title, modules in BEYOND.items():
        parts.append(f"## {title}\n")
        for module, names in modules.items():
            for name in names:
                thing = getattr(importlib.import_module(module), name)
                parts += _entry(name, thing, f"From `{module}`.\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(name: str, thing: Any, origin: str = "") -> Iterator[str]:
    yield f"### {name}\n"
    yield origin
    if not (inspect.isclass(thing) and issubclass(thing, (BaseException, enum.Enum))):
        signature = _signature(name, thing)
        if signature:
            yield signature
    yield markdown(_doc(thing))
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and name != "Options":
            yield markdown(_attributes(thing))
        if "__init__" in vars(thing) and thing.__init__.__doc__:
            yield markdown(_doc(thing.__init__))
        for member, value in _members(thing):
            yield f"#### {name}.{member}\n"
            if not is_property(value):
                yield _signature(f"{name}.{member}", value)
            yield markdown(_doc(value))


def is_property(value: object) -> bool:
    """Whether a member of a class is read like an attribute."""
    return isinstance(value, property | functools.cached_property)


def function_of(value: Any) -> Any:
    """The function of a method or property as a class has it."""
    if isinstance(value, functools.cached_property):
        return value.func
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _doc(thing: Any) -> str:
    """The docstring, without the line that tells developers why the code is long. A dataclass has
    the attributes of those that it extends as well."""
    text = inspect.getdoc(getattr(thing, "__func__", thing)) or ""
    if dataclasses.is_dataclass(thing):
        for base in thing.__mro__[1:]:  # type: ignore[union-attr]
            text += (inspect.getdoc(base) or "").partition("\nAttributes:")[2]
    return re.sub(r"^Long because .*\n?", "", text, flags=re.M)


def attributes(cls: type) -> dict[str, str]:
    """What the strings below a class's fields say of them, by field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def _attributes(cls: type) -> str:
    """The same as a section of a docstring; empty without any."""
    lines = ["Attributes:"]
    for name, text in attributes(cls).items():
        lines.append(textwrap.indent(f"{name}: {text}".replace("\n", "\n    "), "    "))
    return "\n".join(lines) if len(lines) > 1 else ""


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, as they are written.

    Those of a base are among them if it is ours and has no entry of its own.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        listed = base is not cls and base.__name__ in lossycoll.__all__
        if base.__module__.startswith("lossycoll") and not listed:
            found |= vars(base)
    for name, value in found.items():
        function = function_of(value)
        shown = not name.startswith("_") or name == "__call__"
        if shown and inspect.isfunction(function) and function.__name__ == name and _doc(value):
            yield name, value


class _Written:
    """Something whose repr is a given text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _as_written(one: inspect.Parameter) -> inspect.Parameter:
    """Annotations without quotes (those of ours are strings), functions by their names."""
    if one.annotation is not one.empty:
        one = one.replace(annotation=_Written(str(one.annotation)))
    if callable(one.default) and one.default is not one.empty:
        one = one.replace(default=_Written(f"{one.default.__module__}.{one.default.__name__}"))
    return one


def _signature(name: str, thing: Any) -> str:
    """A block of code; empty for data classes, whose attributes are listed."""
    if dataclasses.is_dataclass(thing):
        return ""
    found = inspect.signature(getattr(thing, "__func__", thing))
    empty = inspect.Signature.empty
    parameters = [
        _as_written(one) for one in found.parameters.values() if one.name not in {"self", "cls"}
    ]
    result = empty if inspect.isclass(thing) else found.return_annotation
    returned = "" if result is empty else f" -> {result}"
    text = f"{name}{inspect.Signature(parameters)}{returned}"
    if len(text) > WIDTH:
        inside = "".join(f"    {one},\n" for one in _marked(parameters))
        text = f"{name}(\n{inside}){returned}"
    return f"```python\n{text}\n```\n"


def _marked(parameters: Iterable[inspect.Parameter]) -> Iterator[object]:
    """The parameters, with the star that begins those given by name."""
    starred = False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            starred = True
        elif one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield one


def markdown(text: str) -> str:
    """A docstring in Google style as markdown."""
    text = re.sub(r":\w+:`~?\.?([\w.]+)`", lambda found: f"`{found[1].split('.')[-1]}`", text)
    text = re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text.replace("``", "`"))
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        title = line.removesuffix(":")
        if title in SECTIONS and line.endswith(":"):
            section = title
            out += ["", f"**{title}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            out += ["", line]
        elif section and line.startswith("    "):
            out.append(_item(section, line[4:]))
        else:
            out.append(re.sub(r"::$", ":", line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


def _item(section: str, line: str) -> str:
    """A line of a section, as part of a list where it names something."""
    if line.startswith(" "):
        return f"  {line.strip()}"
    if section in ("Returns", "Yields"):
        return line
    found = re.match(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?: ?(.*)", line)
    return f"- `{found[1]}`: {found[2]}" if found else line


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(PAGE.parents[1])}: {len(page().split())} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The order of files: the tests mirror the package, all stay short, and say why if they don't."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PER_FILE

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "lossycoll"
NATIVE = TESTS.parent / "native"
NOT_ROOMS = {
    "benchmarks": "the studies in benchmarks/",
    "conformance": "torch's suite for backends",
    "failures": "the promises of docs/failures.md, each through all packages",
    "gpu": "CUDA tensors on a GPU, through all packages",
    "mutations": "what make mutate breaks",
    "native": "the C sources by themselves",
    "repository": "examples, guide, wheel, and the tests themselves",
    "support": "helpers",
    "tools": "the tools in tools/",
}
"""Folders of tests/ that aren't the tests of a package in lossycoll/, and what they are."""
FLOORS = (
    *(("cli",), ("train",), ("simulate",), ("lab",), ("backend",)),
    *(("runtime/collectives",), ("runtime/world",), ("runtime/net",)),
    *(("runtime/core",), ("runtime/engine",), ("options",), ("plan",)),
)
"""The packages, each above those that it may import; `make lint` holds the package to them."""
USES_FROM_ABOVE = {
    "backend/test_survivors_alike.py": "what training asks the backend, at its most unlucky moment",
    "runtime/engine/test_lossless.py": "packets as large as a group chooses them",
}
"""Tests that import what stands above the package that they test, and why."""
MOST_PACKAGE_LINES = 500
MOST_FUNCTION_LINES = 60
LONG_BECAUSE = "Long because "
"""Begins the line of a docstring in lossycoll/ that says why a file or a function is longer."""
MOST_LINES = 700
LONGER: dict[str, str] = {}
"""Files of tests that are longer, and why."""
WITHOUT_SAMPLE = {
    "lab/test_swarm_splits.py",
    "repository/test_slurm.py",
    "repository/test_torchrun.py",
    "repository/test_trainjob.py",
}
"""Files whose tests are all long: what they test has its short sample in another file, or needs
other people's programs."""


def files() -> Iterator[Path]:
    yield from sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def test_tests_mirror_the_package() -> None:
    for path in files():
        if path.parts[0] not in NOT_ROOMS:
            assert (PACKAGE / path.parent).is_dir(), f"{path}: lossycoll/{path.parent} isn't there"
    for name in NOT_ROOMS:
        assert (TESTS / name).is_dir(), name
        assert not (PACKAGE / name).exists(), f"{name} is a package now"


def _floor(path: str) -> int | None:
    """The number of the floor with this module or folder; 0 is the uppermost."""
    for number, rooms in enumerate(FLOORS):
        if any(f"{path}/".startswith(f"{room}/") for room in rooms):
            return number
    return None


def _imports(source: str) -> Iterator[str]:
    """Modules of the package that a test imports, as paths in lossycoll/."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("lossycoll."):
                yield name.removeprefix("lossycoll.").replace(".", "/")


def test_tests_use_nothing_above_what_they_test() -> None:
    """What tests two packages together belongs to the upper one."""
    above = {}
    for path in files():
        own = _floor(path.parent.as_posix())
        if own is not None:
            used = {*_imports((TESTS / path).read_text(encoding="utf-8"))}
            higher = {name for name in used if (floor := _floor(name)) is not None and floor < own}
            if higher:
                above[path.as_posix()] = higher
    assert above.keys() == USES_FROM_ABOVE.keys(), above


def test_every_package_has_its_tests() -> None:
    for package in PACKAGE.rglob("__init__.py"):
        room = package.parent.relative_to(PACKAGE)
        has_code = any(path.name != "__init__.py" for path in package.parent.glob("*.py"))
        if _floor(room.as_posix()) is not None and has_code:
            assert list((TESTS / room).glob("test_*.py")), f"nothing tests lossycoll/{room}"


def test_files_are_short() -> None:
    lines = {str(path): (TESTS / path).read_text(encoding="utf-8").count("\n") for path in files()}
    assert {path for path, count in lines.items() if count > MOST_LINES} == set(LONGER)


def long_parts(source: str) -> Iterator[tuple[str, bool]]:
    """(name, whether its docstring says why) of a module that is too long, and of its functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module):
            name, lines, most = "the file", source.count("\n"), MOST_PACKAGE_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines, most = node.end_lineno - node.lineno + 1, MOST_FUNCTION_LINES
            name = f"{node.name} (line {node.lineno})"
        else:
            continue
        if lines > most:
            says = (ast.get_docstring(node) or "").splitlines()
            yield f"{name}: {lines} lines", any(line.startswith(LONG_BECAUSE) for line in says)


def test_what_is_long_in_the_package_says_why() -> None:
    silent = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, reason in long_parts(path.read_text(encoding="utf-8"))
        if not reason
    ]
    assert not silent, f"shorten these, or begin a line of their docstrings with {LONG_BECAUSE!r}"


def test_long_parts_are_found() -> None:
    body = "    pass\n" * MOST_FUNCTION_LINES
    assert not list(long_parts("def f():\n" + body[: -len("    pass\n")]))
    assert list(long_parts("def f():\n" + body)) == [("f (line 1): 61 lines", False)]
    reason = '    """Does it.\n\n    Long because it is.\n    """\n'
    assert list(long_parts("def f():\n" + reason + body)) == [("f (line 1): 65 lines", True)]
    lines = "pass\n" * (MOST_PACKAGE_LINES + 1)
    assert list(long_parts(lines)) == [("the file: 501 lines", False)]


def test_what_is_skipped_says_why() -> None:
    for path in files():
        for node in ast.walk(ast.parse((TESTS / path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            kind = ast.unparse(node.func)
            if kind in ("pytest.skip", "pytest.importorskip"):
                says = bool(node.args)
            elif kind in ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"):
                says = any(keyword.arg == "reason" for keyword in node.keywords)
            else:
                continue
            assert says, f"{path}:{node.lineno}: {kind} without a reason"


def _sleeps(node: ast.stmt) -> bool:
    """Whether the statement only sleeps, or asserts that a time isn't over."""
    if isinstance(node, ast.Assert):
        return "monotonic" in ast.unparse(node)
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("time.sleep(")


def test_waits_for_a_condition_say_which() -> None:
    """``until`` of tests/support/waiting.py names what did not come; such a loop hangs, or goes on
    as if it had."""
    own = [
        f"{path}:{node.lineno}"
        for path in files()
        for node in ast.walk(ast.parse((TESTS / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.While) and all(_sleeps(each) for each in node.body)
    ]
    assert not own, "wait by tests.support.waiting.until"


def test_every_file_has_a_sample_in_the_short_suite(request: pytest.FixtureRequest) -> None:
    found = request.config.stash[PER_FILE]
    only_long = {path for path, (short, long) in found.items() if long and not short}
    assert only_long <= WITHOUT_SAMPLE


def _native_includes() -> dict[str, set[str]]:
    """What each native file knows: ``stream_in`` stands for stream_in.c and stream_in.h."""
    known: dict[str, set[str]] = {}
    for path in [*NATIVE.glob("*.c"), *NATIVE.glob("*.h")]:
        names = re.findall(r'#include "(\w+)\.[ch]"', path.read_text(encoding="utf-8"))
        known.setdefault(path.stem, set()).update(set(names) - {path.stem})
    return known


def test_native_files_know_only_those_below() -> None:
    known = _native_includes()
    order = list(graphlib.TopologicalSorter(known).static_order())
    assert order.index("combine") < order.index("loop") < order.index("api")


def callees(sources: dict[str, str]) -> dict[str, set[str]]:
    """Whose functions each of ``sources`` names. Files may share a header, so what they include
    doesn't say it."""
    bare = {
        name: re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.S)
        for name, text in sources.items()
    }
    homes = {
        symbol: name
        for name, text in bare.items()
        for symbol in re.findall(
            r"^(?!static\b|typedef\b)\w[\w *]*?\b(lc_\w+)\([^;{}]*\)\s*\{", text, re.M
        )
    }
    return {
        name: {homes[symbol] for symbol in re.findall(r"\blc_\w+", text) if symbol in homes}
        - {name}
        for name, text in bare.items()
    }


def test_native_files_call_in_no_circle() -> None:
    calls = callees({path.name: path.read_text(encoding="utf-8") for path in NATIVE.glob("*.c")})
    assert calls["link_udp.c"] >= {"link_udp_send.c", "link_udp_fast_paths.c"}
    list(graphlib.TopologicalSorter(calls).static_order())  # which raises CycleError


def test_calls_in_a_circle_are_found() -> None:
    above = "static int f(void) {\n    return lc_b(1);\n}\nint lc_a(int a) {\n}\n"
    sources = {"a.c": above, "b.c": "/* lc_a */\nuint32_t *lc_b(const int *b,\n  int c) {\n}\n"}
    assert callees(sources) == {"a.c": {"b.c"}, "b.c": set()}
    sources["b.c"] += 'static const ops o = {.f = lc_a, .name = "lc_x"};\n'
    assert callees(sources) == {"a.c": {"b.c"}, "b.c": {"a.c"}}


SYSTEM_HEADER = re.compile(r"[a-z0-9_]+\.h|(?:sys|linux|net|netinet|arpa)/[a-z0-9_]+\.h")
"""Those of C, Linux and the compiler; Python's, torch's and NumPy's have other names or folders."""


def foreign(source: str, folder: Path) -> list[str]:
    """What a native source includes or names that is neither native's nor the system's."""
    system = re.findall(r"^\s*#\s*include\s*<([^>]+)>", source, re.M)
    own = re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, re.M)
    out = [name for name in system if not SYSTEM_HEADER.fullmatch(name)]
    out += [name for name in own if not (folder / name).resolve().is_relative_to(NATIVE)]
    out += [name for name in own if not (folder / name).is_file()]
    return out + re.findall(r"\b_?Py[A-Z_]\w*|\b(?:at|c10|torch)::\w+", source)


def test_what_is_foreign_to_native_is_found() -> None:
    include = "#include "
    assert foreign(f"{include}<Python.h>\n{include}<torch/torch.h>", NATIVE) == [
        "Python.h",
        "torch/torch.h",
    ]
    assert foreign(f'{include}"../lossycoll/x.h"', NATIVE) == ["../lossycoll/x.h"] * 2
    assert foreign("PyObject *o = Py_None;", NATIVE) == ["PyObject", "Py_None"]
    assert foreign(f'{include}<sys/uio.h>\n{include}"state.h"', NATIVE) == []


@pytest.mark.parametrize("folder", ["", "lab"])
def test_native_knows_neither_python_nor_torch(folder: str) -> None:
    paths = [*(NATIVE / folder).glob("*.[ch]")]
    assert paths
    found = {
        path.name: names
        for path in paths
        if (names := foreign(path.read_text(encoding="utf-8"), path.parent))
    }
    assert not found


def test_helpers_of_tests_import_in_no_circle() -> None:
    known: dict[str, set[str]] = {}
    for path in (TESTS / "support").glob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        names = {n.module.removeprefix("tests.support.") for n in nodes if _of_support(n)}
        names |= {a.name for n in nodes if _is_support(n) for a in n.names}
        known[path.stem] = names - {path.stem}
    assert known["forks"] >= {"warm"}
    list(graphlib.TopologicalSorter(known).static_order())  # which raises CycleError


def _of_support(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.support.")


def _is_support(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "tests.support"


def test_native_functions_are_declared_by_their_own_file() -> None:
    """Else a file could call one above it without an include that says so."""
    for path in NATIVE.glob("*.c"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^(?:extern|[a-z]\w*[\w *]* \*?lc_\w+\([^;{]*\);)", text, re.M), path


def test_no_clock_of_the_day_decides_anything() -> None:
    """Ranks' clocks may be hours apart, and may be set while a job runs."""
    told = {"metrics.py", "flight_recorder.py"}  # they only say when something was
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("cli", "lab") or path.name in told:
            continue
        found = re.search(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(", path.read_text())
        assert found is None, f"{path}: {found}"
    # The kernel's stamps are of this clock: each is compared with this machine's own alone.
    of_stamps = {"clock.c"}
    for path in sorted(NATIVE.glob("*.c")):
        assert path.name in of_stamps or "CLOCK_REALTIME" not in path.read_text(), path

"""tools/mutate: what counts as caught, tried on a small tree with an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.mutations.model import Mutation, mutation
from tools import mutate
from tools.mutate import Copy, Result, Verdict

TREE = {
    "native/sum.c": "int sum(int a, int b) { return a + b; }\n",
    "native/build_cffi.py": (
        "class ffi:\n"
        "    @staticmethod\n"
        "    def emit_c_code(path):\n"
        "        open(path, 'w').close()\n"
    ),
    "tools/mutate.mk": "lossycoll/_native.abi3.so: native/sum.c\n\t$(CC) -shared -fPIC -o $@ $<\n",
    "tests/native/Makefile": (
        "build/plain/test_sum: test_sum.c ../../native/sum.c\n"
        "\tmkdir -p build/plain\n"
        "\t$(CC) -o $@ $^\n"
    ),
    "tests/native/test_sum.c": ("int sum(int, int);\nint main(void) { return sum(1, 2) != 3; }\n"),
    "lossycoll/twice.py": (
        "import ctypes\n"
        "LIBRARY = ctypes.CDLL(__file__.replace('twice.py', '_native.abi3.so'))\n"
        "def twice(a):\n"
        "    return LIBRARY.sum(a, a)\n"
    ),
    "tests/test_twice.py": (
        "import threading\n"
        "import pytest\n"
        "from lossycoll.twice import twice\n"
        "def test_twice():\n"
        "    assert twice(2) == 4\n"
        "@pytest.mark.timeout(1)\n"
        "def test_in_time():\n"
        "    assert twice(2) == 4 or threading.Event().wait()\n"
    ),
    "pytest.ini": "[pytest]\n",
}
PROGRAM = "native:test_sum"
TWICE = "tests/test_twice.py::test_twice"
IN_TIME = "tests/test_twice.py::test_in_time"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    root, folder = tmp_path / "root", tmp_path / "copy"
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return Copy(folder, root)


def of_c(after: str, test: str = PROGRAM, seconds: float = 60.0, hangs: bool = False) -> Mutation:
    return mutation("of C", "native/sum.c", "return a + b;", after, test, seconds, hangs)


def of_python(after: str, test: str = TWICE) -> Mutation:
    return mutation("of Python", "lossycoll/twice.py", "return LIBRARY.sum(a, a)", after, test)


FOREVER = "for (;;) ;"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (of_c("return a - b;"), Result.CAUGHT),
        (of_c("return b + a;"), Result.SURVIVED),
        (of_c(FOREVER, seconds=0.1), Result.HUNG),
        (of_c(FOREVER, seconds=0.1, hangs=True), Result.CAUGHT),
        (of_c("return a - b;", hangs=True), Result.CAUGHT),
        (of_c("return b + a;", hangs=True), Result.SURVIVED),
        (of_c("return c;"), Result.NOT_BUILT),
        (of_c("return c;", TWICE), Result.NOT_BUILT),
        (of_python("return 2 * a"), Result.SURVIVED),
        (of_python("return ("), Result.NOT_BUILT),
        (of_python("return a\nimport nothing_of_that_name"), Result.NOT_RUN),
        (of_python("return a", IN_TIME), Result.HUNG),
        (of_python("return a", "tests/test_twice.py::test_no_such"), Result.NOT_RUN),
    ],
    ids=lambda value: value.name if isinstance(value, Result) else value.edits[0].after,
)
def test_what_counts_as_caught(copy: Copy, broken: Mutation, expected: Result) -> None:
    verdict = mutate.examine(copy, broken)
    assert verdict.result is expected, verdict.output
    for name, text in TREE.items():
        assert (copy.folder / name).read_text() == text


def test_a_mutation_is_gone_before_the_next_is_tried(copy: Copy) -> None:
    """Its engine too, though the next breaks no C."""
    verdicts = mutate.try_all(copy, [of_c("return a - b;", TWICE), of_python("return 2 * a")])
    assert [each.result for each in verdicts.values()] == [Result.CAUGHT, Result.SURVIVED]


def test_what_fails_without_a_mutation_catches_none(
    copy: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy.folder / "tests/native/test_sum.c").write_text("int main(void) { return 1; }\n")
    verdicts = mutate.try_all(copy, [of_c("return a - b;"), of_python("return a")])
    assert [each.result for each in verdicts.values()] == [Result.NOT_HEALTHY, Result.CAUGHT]
    said = capsys.readouterr().out
    assert "of C: ERROR: the test fails without the mutation" in said
    assert "of Python: caught (" in said


def test_an_edit_that_fits_nowhere_is_an_error(copy: Copy) -> None:
    with pytest.raises(ValueError, match=r"isn't once in native/sum\.c"):
        mutate.examine(copy, mutation("x", "native/sum.c", "return b;", "", PROGRAM))


def test_the_summary_names_the_slowest_and_what_was_not_caught() -> None:
    verdicts: Mapping[str, Verdict] = {
        "quick": Verdict(Result.CAUGHT, 1.0, 2.0),
        "slow": Verdict(Result.CAUGHT, 0.5, 9.0, "as it should be"),
        "hung": Verdict(Result.HUNG, 0.5, 7.0, "here it hung"),
    }
    assert mutate.summary(verdicts).splitlines() == [
        "2 of 3 mutations were caught; 20 s",
        "slowest: slow 9.0 s, hung 7.0 s, quick 2.0 s",
        "- hung: NOT CAUGHT: the test hung (7.0 s, built in 0.5 s)",
        "here it hung",
    ]

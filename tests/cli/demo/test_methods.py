"""Training methods are a registry: one from elsewhere runs in the demo and in the study."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.quality import variants
from lossycoll.cli.demo import methods
from lossycoll.cli.demo.report import demo_runs

ROOT = Path(__file__).resolve().parents[3]
IMPORT = "import sys, tests.cli.demo.sign_sgd\n"
DEMO = IMPORT + "from lossycoll.cli.main import main\nsys.exit(main(sys.argv[1:]))"
STUDY = (
    IMPORT + "from benchmarks.__main__ import main\n"
    "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
)


def run(program: str, *arguments: str) -> str:
    """Runs Python code as its own process; returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_built_in_methods_are_runs_of_the_demo() -> None:
    assert [one.name for one in methods.methods()] == ["ddp", "ddp+driftbound", "sharded"]
    assert list(demo_runs()) == ["gloo", "clean", "lossy", "bounded", "sharded"]
    assert [one.name for one in demo_runs().values()][:3] == ["ddp"] * 3


def test_what_cannot_be_registered() -> None:
    sharded = methods.SHARDED
    assert methods.register(sharded) is sharded  # once more is no harm
    with pytest.raises(ValueError, match=r"'bounded' of other has the name of 'ddp\+driftbound'"):
        methods.register(dataclasses.replace(sharded, name="bounded", module="other"))
    with pytest.raises(ValueError, match="put it into a module of its own"):
        methods.register(dataclasses.replace(sharded, name="mine", module="__main__"))
    with pytest.raises(ValueError, match="registers no method 'mine', only ddp"):
        methods.find("mine", methods.__name__)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "gloo"}, "has the name of a run of the demo"),
        ({"run": "clean"}, "has the name of a run of the demo"),
        *(({"name": name}, "wanted letters, digits") for name in ("", "a,b", "../x y")),
        ({"options": {"repiar": 1}}, "unknown option repiar; did you mean repair"),
        ({"module": "no.such"}, "of no.such isn't importable by ranks; wanted __name__"),
    ],
)
def test_a_bad_field_is_refused(changes: dict[str, Any], complaint: str) -> None:
    before = methods.methods()
    with pytest.raises(ValueError, match=complaint):
        methods.register(dataclasses.replace(methods.SHARDED, **{"name": "mine", **changes}))
    assert methods.methods() == before


def test_a_reloaded_method_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_METHODS", {one.name: one for one in methods.methods()})
    copy = types.FunctionType(methods.wrap_ddp.__code__, methods.wrap_ddp.__globals__)
    copy.__qualname__ = methods.wrap_ddp.__qualname__
    again = dataclasses.replace(methods.DDP, wrap=copy)
    assert methods.register(again) is methods.find("ddp", again.module) is again
    assert len({again, methods.DDP}) == 2


def test_a_method_that_returns_nothing_is_named() -> None:
    nothing: Any = None

    def bad(*_: object) -> Any:
        return None

    with pytest.raises(TypeError, match=r"wrap of method 'mine' of .* returned None, wanted"):
        dataclasses.replace(methods.DDP, name="mine", wrap=bad).prepare(nothing, nothing, {})


def test_no_method_takes_the_name_of_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(methods.DDP, name="zero-fill")
    monkeypatch.setattr(variants, "methods", lambda: (mine,))
    with pytest.raises(ValueError, match="'zero-fill' has the name of a variant"):
        variants.variants()


@pytest.mark.long
def test_a_method_from_elsewhere_runs_in_the_demo(tmp_path: Path) -> None:
    small = ["--ranks", "2", "--layers", "1", "--width", "32", "--context", "32", "--batch", "2"]
    chosen = ["--runs", "gloo,sign-sgd", "--steps", "8", "--loss", "0.3", "--out", str(tmp_path)]
    shown = run(DEMO, "demo", *small, *chosen)
    assert "sign-sgd: each step follows the sign of the mean that arrived." in shown
    found = json.loads((tmp_path / "demo.json").read_text())["runs"]["sign-sgd"]
    assert found["traffic"]["packets_injected"] > 0
    # One round of resending, as the method's options have it, leaves 9% of 30%.
    share = found["traffic"]["packets_missing"] / found["traffic"]["packets_sent"]
    assert 0 < share < 0.15
    assert found["validation_loss"] < found["curves"]["validation"][0][1]
    assert (tmp_path / "demo.png").exists()


def test_a_method_from_elsewhere_is_in_the_study() -> None:
    asked = """
from benchmarks.studies.quality.matrix import compared, method_names, runs
from benchmarks.studies.quality.variants import variants
print(compared()[-2], method_names()[-1], variants()["sign-sgd"].colour)
print(sum(run.variant == "sign-sgd" for run in runs((1,))))
"""
    # Both tasks, with 4 and 8 ranks: three kinds of loss at four rates, and without loss.
    assert run(IMPORT + asked).split() == ["sign-sgd", "sign-sgd", "tab:pink", str(4 * (3 * 4 + 1))]


@pytest.mark.long
def test_a_method_from_elsewhere_runs_in_the_study(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    (tmp_path / "quality.md").write_text(
        "<!-- digits-perplexity-4: begin --><!-- digits-perplexity-4: end -->\n"
    )
    cell = ["task=digits", "world=4", "kind=none,single", "loss=0.0,0.1"]
    words = [word for one in (*cell, "variant=reliable,sign-sgd") for word in ("--only", one)]
    files = ["--results", str(results), "--report", str(tmp_path)]
    run(STUDY, "quality", *words, *files, "--seeds", "1", "--steps", "6")
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(entries) == 3
    table = (tmp_path / "quality.md").read_text()
    assert "| sign-sgd |" in table
    assert "| 10% single |" in table

"""``lossycoll try``: a user's own script at several losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lossycoll.cli import main as cli
from lossycoll.cli import trial
from lossycoll.cli.answer import EXIT_FAILED
from lossycoll.cli.main import EXIT_USAGE
from lossycoll.cli.trial import Trial, complaints, mentions, values_by_loss
from tests.support.harness import warm_python

PLAIN = """
import os, sys
inject = os.environ.get("LOSSYCOLL_INJECT", "")
print("event=ready" if os.environ["RANK"] == "0" else "", file=sys.stderr)
print("step 1 loss: 9")
if "loss=0.5" in inject and os.environ["RANK"] == "0":  # of another rank it might not live to print
    sys.exit("it diverged")
print("step 2 loss:", 2.0 if not inject else 3.0, os.environ["WORLD_SIZE"])
"""
SMALL = """
import torch, torch.distributed as dist, lossycoll
dist.init_process_group("lossy")
dist.all_reduce(torch.ones(10))
print("loss = nan")
dist.destroy_process_group()
"""
REAL = """
import torch, torch.distributed as dist, lossycoll
dist.init_process_group("lossy")
tensor = torch.ones(1_000_000)
dist.all_reduce(tensor)
print("missing =", lossycoll.stats().packets_missing)
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss=0.5 loss: 0.25", 0.25),
        ("last loss 1e-3, of 4", 1e-3),
        ('{"step": 3, "loss": 2.5}', 2.5),
        ("loss = -.5", -0.5),
        ("loss nan", float("nan")),
        ("loss=0.5\nloss=NaN", float("nan")),
        ("loss: -Infinity", float("-inf")),
        ("the loss is inf, not loss information: loss=0.5.", 0.5),
        *((f"loss=7\nloss={part}", None) for part in ("0.53s", "1,234.5", "1.2.3", "1e5x", "n/a")),
        ("val_loss 3, train-loss=4, loss1 5, x.loss 6, losses 7, loss 8th", None),
        ("", None),
    ],
)
def test_a_metric_is_the_last_number_behind_its_name(text: str, value: float | None) -> None:
    found = mentions(text, "loss") or [(None, "")]
    assert found[-1][0] == pytest.approx(value, nan_ok=True)


TRANSFORMERS = "{'loss': '2.1', 'grad_norm': '0.9'}\n{'eval_loss': '1.637', 'epoch': '1'}\n"
LIGHTNING = """
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃      Validate metric      ┃       DataLoader 0        ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│         eval_loss         │     1.637000083923339     │
│            acc            │            1.0            │
└───────────────────────────┴───────────────────────────┘
"""
PLAIN_TABLE = """
────────────────────────────────────────────────────────
     Validate metric           DataLoader 0
────────────────────────────────────────────────────────
        eval_loss            1.637
────────────────────────────────────────────────────────
"""
MARKDOWN = "| metric | value |\n|---|---|\n| eval_loss | 1.637 |\n| eval_loss | acc |\n"
LIGHTNING_BAR = "Epoch 1: 100%|████| 60/60 [00:00<00:00, 9.1it/s, v_num=3, eval_loss=1.637]"
KERAS = (
    "Epoch 2/2\n\x1b[1m 1/60\x1b[0m \x1b[32m━\x1b[0m \x1b[1m4s\x1b[0m 69ms/step - eval_loss: 2.1"
    "\x08\x08\x08\r\x1b[1m60/60\x1b[0m ━━━ 0s 2ms/step - loss: 0.9 - "
    "\x1b[1meval_loss\x1b[0m: 1.637\r\n"
)
OLD_KERAS = "60/60 [=====>....] - ETA: 0s - loss: 0.9123 - eval_loss: 1.637e+00 - val_acc: 0.5\r"
JSON_LINES = '{"step":1,"eval_loss":2.5}\n{"step":2,"eval_loss":1.637,"ok":null}\n'
IN_JSON = '{"level": "info", "msg": "{\\"eval_loss\\": 1.637}"}'
VALUES = "eval_loss: tensor(1.6370, grad_fn=<X>) {'eval_loss': np.float64(1.637), 'x': 3}"


@pytest.mark.parametrize(
    "text",
    [
        *(TRANSFORMERS, LIGHTNING, PLAIN_TABLE, MARKDOWN, LIGHTNING_BAR, KERAS, OLD_KERAS),
        *(JSON_LINES, IN_JSON, VALUES, "eval_loss='1.637'", 'eval_loss: "1.637"'),
    ],
)
def test_a_metric_is_read_as_frameworks_print_it(text: str) -> None:
    assert mentions(text, "eval_loss")[-1][0] == pytest.approx(1.637)


def test_a_table_of_names_is_no_value() -> None:
    assert not mentions("| loss | acc |\n", "loss")
    assert complaints([Trial(0.2, 1, None, 1, 9, 1.0)], "loss")


@pytest.mark.long
def test_a_script_runs_once_per_loss_and_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trials.json"
    line = ["try", "--loss", "0,0.1,0.5", "--seeds", "2", "--ranks", "3", "--out", str(out)]
    assert cli.main([*line, "--", sys.executable, script(tmp_path, PLAIN)]) == 1
    said = capsys.readouterr()
    rows = [row.split() for row in said.out.splitlines()]
    assert rows[0][:4] == ["dropped", "loss", "from", "to"]
    assert rows[1][:5] == ["0", "2", "2", "2", "-"]
    assert rows[2][:5] == ["0.1", "3", "3", "3", "+50.00%"]
    assert rows[3][0] == "0.5"
    assert rows[3][-1] == "2"
    assert "it diverged" in said.err
    found = json.loads(out.read_text())
    assert found["metric"] == "loss"
    trials = [(one["loss"], one["seed"], one["value"], one["groups"]) for one in found["trials"]]
    # A run that failed has the value that it came to.
    assert trials == [
        *((0, 1, 2, 1), (0, 2, 2, 1)),
        *((0.1, 1, 3, 1), (0.1, 2, 3, 1)),
        *((0.5, 1, 9, 1), (0.5, 2, 9, 1)),
    ]


def test_packets_of_a_real_job_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["try", "--loss", "0,0.2", "--metric", "missing", "--json"]
    assert cli.main([*line, "--", warm_python(), script(tmp_path, REAL)]) == 0
    said = capsys.readouterr()
    whole, lossy = json.loads(said.out)["trials"]
    assert (whole["value"], whole["groups"]) == (0, 1)
    assert lossy["value"] > 0
    assert (whole["dropped"], lossy["dropped"] > 0) == (None, True)
    assert "lossycoll try:" not in said.err


@pytest.mark.long
def test_a_script_that_loses_nothing_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["try", "--loss", "0.3", "--json", "--", warm_python(), script(tmp_path, SMALL)]
    assert cli.main(line) == 1
    said = capsys.readouterr()
    (found,) = json.loads(said.out, parse_constant=pytest.fail)["trials"]
    assert (found["value"], found["groups"], found["dropped"]) == (None, 1, 0)
    assert "no packet was dropped" in said.err


def test_what_makes_the_table_worth_less_is_said() -> None:
    good = [Trial(0, 1, 1.0, 1, None, 2.0), Trial(0.1, 1, 2.0, 1, 9, 2.0)]
    assert complaints(good, "loss") == []
    (silent,) = complaints([*good, Trial(0.2, 1, None, 1, 9, 1.0)], "loss")
    assert "printed no loss=VALUE" in silent
    (unread,) = complaints([*good, Trial(0.2, 1, None, 1, 9, 1.0, unread="0.53s")], "loss")
    assert "behind the last loss stands '0.53s', wanted a number" in unread
    (gloo,) = complaints([*good, Trial(0.2, 1, 1.0, 0, None, 1.0)], "loss")
    assert 'init_process_group("lossy")' in gloo
    failed = [Trial(0.2, seed, 3.0, 1, 9, 1.0, failure=f"number {seed}") for seed in (1, 2)]
    assert complaints([*good, *failed], "loss") == ["loss 0.2, seed 1: number 1"]
    assert values_by_loss([*good, *failed]) == {0: [1.0], 0.1: [2.0], 0.2: []}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["try"], "nothing to run; write a command after --"),
        (["try", "--"], "nothing to run"),
        (["try", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["try", "--loss", "0", "python", "train.py", "--lr", "1"], "write -- before the command"),
        (
            ["try", "--loss", "0.9", "--burst", "1.05", "--", sys.executable],
            "burst is 1.05, wanted at least 9",
        ),
        (["try", "--metric", " ", "--", sys.executable], "the metric needs a name"),
        (["try", "--out", "/dev/null/x", "--", sys.executable], "cannot write to /dev/null/x"),
    ],
)
def test_what_cannot_run_is_refused(
    line: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    assert complaint in capsys.readouterr().err


def test_results_are_printed_where_their_file_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that was full at the end alone. A run that failed goes before."""
    monkeypatch.setattr(trial, "must_be_writable", lambda file: None)
    line = ["try", "--loss", "0", "--out", str(tmp_path / "none" / "trials.json"), "--"]
    line += [sys.executable, "train.py"]
    for failure, status in (("", EXIT_USAGE), ("it diverged", EXIT_FAILED)):
        run = Trial(0.0, 1, 2.5, 1, 0, 1.0, failure=failure)
        monkeypatch.setattr(trial, "trial", lambda *_, run=run: run)
        assert cli.main(line) == status
        said = capsys.readouterr()
        assert "dropped" in said.out
        assert "trials.json can't be written: No such file or directory" in said.err

"""A part of torch's conformance suite, and what its runner makes of cases that fail.

``make conformance`` runs the whole suite; docs/conformance.md has what came of it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .__main__ import WorkerError, outcomes
from .exceptions import Excuse
from .runner import Outcome, first_line
from .table import BY_TORCH, page, rows_by_torch, versions_of
from .verdict import contradictions

COLLECTIVES = [
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_gather",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_full_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]
OFTEN = [
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_scatter_object_list",
]
"""Those of the short suite."""
TRAINING = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_grads_same_across_ranks_with_no_sync",
    "test_get_backend",
]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def _all_that_pass() -> list[str]:
    """Those that the page says gloo's and lossy's reliable calls pass at 4 ranks.

    Without monitored barriers: they send no packets, and in one of them a group fails that another
    rank may still be making.
    """
    _, _, rows = PAGE.read_text(encoding="utf-8").partition("\n## Test by test\n")
    table, _, _ = rows.partition("\n## ")
    cells = re.findall(r"^\| `(test_\w+)` \| ([^|]+) \| ([^|]+) \|", table, re.M)
    return [
        name
        for name, *found in cells
        if "monitored_barrier" not in name and all(one.endswith("pass") for one in found)
    ]


def _passed(found: dict[str, Outcome], wanted: list[str]) -> None:
    assert list(found) == wanted
    assert {name: out for name, out in found.items() if out.kind != "pass"} == {}


@pytest.mark.in_clear
@pytest.mark.long
def test_reliable_passes_what_gloo_passes() -> None:
    _passed(dict(outcomes("reliable", 3, COLLECTIVES)), COLLECTIVES)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("two-hosts", OFTEN),
        pytest.param("two-hosts", _all_that_pass(), marks=pytest.mark.long, id="two-hosts-all"),
        pytest.param("two-sites", _all_that_pass(), marks=pytest.mark.long, id="two-sites-all"),
    ],
)
def test_hosts_and_sites_pass_what_ranks_that_are_all_alike_pass(
    mode: str, names: list[str]
) -> None:
    assert names
    found = dict(outcomes(mode, 4, names))
    _passed(found, names)
    by_tiers = [name for name, out in found.items() if out.counters.get("by_tiers")]
    assert len(by_tiers) > len(names) / 2


@pytest.mark.long
def test_default_passes_what_gloo_passes_when_packets_are_lost() -> None:
    found = dict(outcomes("default-loss", 4, TRAINING))
    _passed(found, TRAINING)
    assert sum(out.counters["packets_injected"] for out in found.values()) > 0


@pytest.mark.long
def test_the_runner_tells_outcomes_apart() -> None:
    found = dict(outcomes("reliable-loss", 3, None, "--samples"))
    assert {name: out.kind for name, out in found.items()} == {
        "test_crash": "fail",
        "test_exit": "fail",
        "test_fail": "fail",
        "test_fail_of_last_rank": "fail",
        "test_hang": "timeout",
        "test_pass": "pass",
        "test_skip_by_status": "skip",
        "test_skip_inside": "skip",
        "test_skip_of_one_rank": "timeout",
        "test_skip_static": "skip",
    }
    reasons = {name: out.reason for name, out in found.items()}
    assert reasons["test_crash"] == "rank 1: ended by SIGKILL"
    assert reasons["test_exit"].endswith("ended with status 3")
    assert reasons["test_fail"].endswith("ValueError: on every rank")
    assert reasons["test_fail_of_last_rank"].startswith("rank 2: ValueError: the last rank only")
    assert "rank 1 in wait_for_nothing (samples.py:" in reasons["test_hang"]
    assert reasons["test_skip_by_status"] == "Need at least 3 CUDA devices"
    assert reasons["test_skip_inside"] == "known inside"
    assert reasons["test_skip_static"] == "known before it starts"
    assert found["test_pass"].counters["packets_injected"] > 0


def test_the_runner_tells_a_pass_from_a_failure() -> None:
    found = dict(outcomes("reliable-loss", 3, ["test_fail", "test_pass"], "--samples"))
    assert {name: out.kind for name, out in found.items()} == {
        "test_fail": "fail",
        "test_pass": "pass",
    }
    assert found["test_fail"].reason.endswith("ValueError: on every rank")
    assert found["test_pass"].counters["packets_injected"] > 0


@pytest.mark.long
def test_a_worker_that_fails_is_an_error() -> None:
    with pytest.raises(WorkerError, match="status 1"):
        list(outcomes("gloo", 2, ["test_of_nothing"], "--samples"))


GLOO = {"a": Outcome("pass"), "b": Outcome("pass"), "c": Outcome("fail"), "d": Outcome("pass")}


def test_what_contradicts_gloo() -> None:
    excuses = {"a": Excuse("", ("default",)), "d": Excuse("", sometimes=True)}

    def found(mode: str, **kinds: str) -> list[str]:
        run = {name: Outcome(kind, "why") for name, kind in kinds.items()}
        return [f"{one}" for one in contradictions(GLOO, run, mode, 3, excuses)]

    assert found("default", a="fail", b="pass", c="timeout", d="pass") == []
    assert found("default", b="skip", c="pass", d="fail") == [
        "b (default, 3 ranks): skip where gloo passes: why"
    ]
    assert found("default", a="pass") == [
        "a (default, 3 ranks): passes, although it is listed as an exception"
    ]
    assert found("reliable", a="timeout") == [
        "a (reliable, 3 ranks): timeout where gloo passes: why"
    ]


def test_the_page_shows_both_worlds_and_what_is_not_explained() -> None:
    skip = Outcome("skip", "no CUDA")
    results = {
        ("gloo", 3): {**GLOO, "e": skip},
        ("gloo", 4): {**GLOO, "e": skip},
        ("reliable", 3): {"a": Outcome("pass"), "b": Outcome("fail", "why | not")},
        ("reliable", 4): {"a": Outcome("pass"), "b": Outcome("pass")},
    }
    by_hand = versions_of(PAGE.read_text(encoding="utf-8"))
    assert "| torch | torch's file |" in by_hand
    text = page({"gloo": results}, ["Date: today"], by_hand)
    assert versions_of(text) == by_hand
    assert "- Date: today" in text
    assert "| `a` | pass | pass |" in text
    assert "| `b` | pass | fail / pass |" in text
    assert "- b (reliable, 3 ranks): fail where gloo passes: why \\| not" in text
    assert "| no CUDA | 1 | 1 | `e` |" in text


def test_rows_of_a_version_count_what_gloo_passes_and_lossy_too(tmp_path: Path) -> None:
    lost = {"operations": 1_200, "packets_injected": 7}
    lossy = {"a": Outcome("pass", counters=lost), "b": Outcome("fail"), "c": Outcome("pass")}
    results = {("gloo", 3): GLOO, ("reliable-loss", 3): lossy}
    rows = rows_by_torch("2.99.0", results)
    assert rows == [("2.99.0", "reliable-loss", "3", "3", "1", "1,200", "7")]
    kept = tmp_path / PAGE.name
    shutil.copy(PAGE, kept)
    BY_TORCH.report(tmp_path, rows)
    text = kept.read_text(encoding="utf-8")
    assert "| 2.99.0 | reliable-loss | 3 | 3 | 1 | 1,200 | 7 | 20" in text
    assert "2.99.0" in versions_of(text), "a whole run would lose the rows"


def test_the_line_that_names_an_error() -> None:
    trace = "Traceback (most recent call last):\n"
    inner = f'{trace}  File "a", line 1, in b\n    c()\nKeyError: 1\n'
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert (
        first_line(f"{inner}{during}{trace}  File\nValueError: two\nlines\n") == "ValueError: two"
    )
    assert first_line("") == ""

"""Ranks that mean something else by a call: each says which call, who, and how they differ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.runtime.collectives.operations import REAP_FROM
from tests.support.failure_cases import CALM, SLACK, Caught, catch
from tests.support.harness import EXACT, init, run_good, run_ranks


def rank_mismatch(rank: int, world: int) -> list[tuple[str, str, str, float]]:
    odd = rank == 1

    def ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(n, dtype=dtype)

    def delivery(group: Any) -> None:
        with lossycoll.reliable() if odd else lossycoll.lossy():
            dist.all_reduce(ones(100_000), group=group)

    def splits(group: Any) -> None:
        send, receive = [2] * world, [3 if odd else 2] + [2] * (world - 1)
        out, given = ones(sum(receive)), ones(sum(send))
        dist.all_to_all_single(out, given, receive, send, group=group)

    def coalesced(group: Any) -> None:
        sizes = [20_000, 10 + odd]
        group.allreduce_coalesced([ones(n) for n in sizes]).wait()

    cases = {
        "size": lambda g: dist.all_reduce(ones(100_000 + odd), group=g),
        "dtype": lambda g: dist.all_reduce(
            ones(100_000, torch.bfloat16 if odd else torch.float32), group=g
        ),
        "same bytes": lambda g: dist.all_reduce(
            ones(100, torch.int32 if odd else torch.float32), group=g
        ),
        "small and large": lambda g: dist.all_reduce(ones(10 if odd else 100_000), group=g),
        "integers": lambda g: dist.all_reduce(ones(10 + odd, torch.int64), group=g),
        "op": lambda g: dist.all_reduce(
            ones(10), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=g
        ),
        "collective": lambda g: (
            dist.barrier(group=g) if odd else dist.all_reduce(ones(10), group=g)
        ),
        "root": lambda g: dist.broadcast(ones(100_000), 1 if odd else 0, group=g),
        "delivery": delivery,
        "splits": splits,
        "coalesced": coalesced,
        "future": lambda g: (
            dist.all_reduce(ones(10 + odd), group=g, async_op=True).get_future().wait()
        ),
    }
    dist.init_process_group("gloo")
    out = []
    for name, call in cases.items():
        group = dist.new_group(backend="lossy")
        dist.barrier()
        begin = time.monotonic()
        kind = text = ""
        try:
            for _ in range(3):  # a root of a broadcast may be through with the first
                call(group)
        except RuntimeError as error:
            kind, text = type(error).__name__, str(error)
        out.append((name, kind, text, time.monotonic() - begin))
        dist.barrier()
        dist.destroy_process_group(group)
    dist.barrier()
    return out


BOTH = {
    "size": ("call #0 is ", "float32[100000]", "float32[100001]"),
    "coalesced": ("call #1 is ", "float32[10]", "float32[11]"),
}
"""What the errors of these must say, on every rank: both calls."""


def test_ranks_that_disagree_on_an_operation_all_say_who_and_how() -> None:
    outcomes = run_ranks(rank_mismatch, 3, CALM)
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)
        assert len(outcome.value) == 12
        for name, kind, text, seconds in outcome.value:
            where = f"{name} on rank {outcome.rank}: {kind} {text}"
            # A rank that was slow is told by the call itself, and has no future.
            if name == "future" and kind == "RuntimeError":
                assert "MismatchError: " in text, where
            else:
                assert kind == "MismatchError", where
                assert name != "future" or "(met in a " in text, where
            assert f"rank {outcome.rank}/3" in text, where
            assert "rank 1 (127.0.0.1:" in text or outcome.rank == 1, where
            assert "make " in text, where
            assert seconds < 3 + SLACK, where
            for part in BOTH.get(name, ()):
                assert part in text, where


def rank_waits_for_the_next(rank: int, world: int) -> str:
    init()
    first = dist.all_reduce(torch.ones(20_000 + (rank == 1)), async_op=True)
    caught = catch(lambda: dist.all_reduce(torch.ones(20_000), async_op=True).wait())
    with pytest.raises(lossycoll.MismatchError):
        first.wait()
    assert caught.kind == "MismatchError", caught
    return caught.text


def test_the_call_in_question_is_named_whichever_is_waited_for() -> None:
    for text in run_good(rank_waits_for_the_next, 2, CALM):
        for part in ("call #0 is ", "float32[20000]", "float32[20001]", "(met in "):
            assert part in text, text


def rank_calls_again(rank: int, world: int) -> tuple[int, str]:
    """Waits for nothing: the engine has failed before anybody has asked it how a call ended."""
    init()
    works = [dist.all_reduce(torch.ones(100_000 + (rank == 1)), async_op=True)]
    caught = Caught("", "", None, 0.0)
    while not caught.kind and len(works) < REAP_FROM:
        time.sleep(0.1 * 2 ** len(works))
        caught = catch(lambda: works.append(dist.all_reduce(torch.ones(20_000), async_op=True)))
    assert caught.kind == "MismatchError", caught
    return len(works), caught.text


def test_a_call_that_comes_after_the_failure_is_refused_with_its_reason() -> None:
    ended = run_good(rank_calls_again, 2, CALM)
    for _, text in ended:
        for part in ("call #0 is ", "float32[100000]", "float32[100001]"):
            assert part in text, text
    # The other rank may have heard of it before its own call had a number.
    assert any(f"(met in call #{number} " in text for number, text in ended), ended


def rank_chained(rank: int, world: int) -> str:
    """As PowerSGD's hook with two buckets, whose futures complete in another order at each rank."""
    init()
    in_order = lossycoll.Options.from_env().futures == "in_order"
    sizes = [40_000, 30_000]
    first, second = (dist.all_reduce(torch.ones(n), async_op=True) for n in sizes)

    def more(elements: int) -> Any:
        def call(_: Any) -> None:
            dist.all_reduce(torch.ones(elements), async_op=True).get_future()

        return call

    chained = [(first, 10), (second, 20)]
    try:
        for work, elements in chained if in_order or rank == 0 else chained[::-1]:
            work.wait()
            work.get_future().then(more(elements)).wait()
        dist.barrier()
        dist.all_reduce(torch.ones(5))
    except RuntimeError as error:
        return str(error)
    dist.destroy_process_group()
    return ""


@pytest.mark.parametrize("futures", ["overlap", "in_order"])
def test_a_mismatch_of_callbacks_names_the_option_that_cures_it(futures: str) -> None:
    for outcome in run_ranks(
        rank_chained, 2, {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_FUTURES": futures}
    ):
        if futures == "overlap":
            assert "a hook that issues collectives in callbacks" in outcome.value
            assert "needs Options(futures='in_order')" in outcome.value
        else:
            assert outcome.value == "", outcome


def test_a_mismatch_without_callbacks_does_not() -> None:
    for outcome in run_ranks(rank_plain_mismatch, 2, {"LOSSYCOLL_LOG": "off"}):
        assert "float32[10]" in outcome.value
        assert "in_order" not in outcome.value


def rank_plain_mismatch(rank: int, world: int) -> str:
    init()
    with pytest.raises(lossycoll.MismatchError) as caught:
        dist.all_reduce(torch.ones(10 + rank))
    return str(caught.value)


def rank_remembers(rank: int, world: int) -> list[float]:
    """Ranks 0 and 1 have made a call of equal values before, of which others are set."""
    init()
    pair, sums = dist.new_group([0, 1]), []
    first, second = {"max_missing": 0.01}, {"max_missing": 0.01, "repair": 0}
    for one, other in ((first, second), (second, first), (first, {**first, "fec": 0})):
        if rank < 2:
            with lossycoll.lossy(**one):
                dist.all_reduce(torch.ones(20_000), group=pair)
        with lossycoll.lossy(**other):
            tensor = torch.ones(20_000)
            dist.all_reduce(tensor)
        sums.append(float(tensor[-1]))
    dist.destroy_process_group()
    return sums


def test_what_a_rank_has_called_before_is_no_mismatch() -> None:
    assert run_good(rank_remembers, 3, {**CALM, **EXACT}) == [[3.0] * 3] * 3


SCOPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fec 16/64": ({"fec": 0.125}, {"fec": 0.25}),
    "fec 0": ({"max_missing": 0.01}, {"max_missing": 0.01, "fec": 0}),
    "repair 0": ({"max_missing": 0.01}, {"max_missing": 0.01, "repair": 0}),
    "estimator zero_fill": ({}, {"estimator": "zero_fill"}),
}


def rank_scopes(rank: int, world: int) -> dict[str, str]:
    dist.init_process_group("gloo")
    out = {}
    for name, scopes in SCOPES.items():
        group = dist.new_group(backend="lossy")
        with pytest.raises(lossycoll.MismatchError) as caught, lossycoll.lossy(**scopes[rank]):
            dist.all_reduce(torch.ones(20_000), group=group)
        out[name] = str(caught.value)
        dist.barrier()
        dist.destroy_process_group(group)
    return out


def test_the_option_in_which_two_scopes_differ_is_named() -> None:
    for texts in run_good(rank_scopes, 2, CALM):
        for name, text in texts.items():
            assert "call #0 is " in text, text
            assert name in text, text

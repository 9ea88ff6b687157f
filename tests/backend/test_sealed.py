"""Jobs with a secret: everything is sealed, and what can't be is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import group_steps
from lossycoll.backend.group_steps import warn_of_clear
from lossycoll.runtime.engine.failures import Where
from tests.support.harness import init, run_good, run_ranks
from tests.support.new_network import run_in_a_new_network
from tests.support.sniffed_job import SECRET, rank_calls
from tests.support.sniffer import can_sniff


@pytest.mark.parametrize(
    "env",
    [
        SECRET,
        pytest.param(
            SECRET | {"LOSSYCOLL_CIPHER": "chacha20-poly1305", "LOSSYCOLL_SEAL": "authenticate"},
            marks=pytest.mark.long,
        ),
        pytest.param({"LOSSYCOLL_SECRET": "a secret of tests"}, marks=pytest.mark.long),
    ],
    ids=["udp", "authenticate", "shared memory"],
)
def test_a_job_with_a_secret_does_what_others_do(env: dict[str, str]) -> None:
    outcomes = run_ranks(rank_calls, 3, env)
    assert [one.error for one in outcomes] == [""] * 3, "\n".join(map(str, outcomes))
    assert [one.value for one in outcomes] == [{"refused": 0, "control": 0}] * 3
    assert all("sealed=" in one.stderr for one in outcomes)
    assert not any(env["LOSSYCOLL_SECRET"] in one.stderr for one in outcomes)


@pytest.mark.in_clear
@pytest.mark.skipif(not can_sniff(), reason="only root sees what passes the interfaces")
def test_nothing_that_a_job_says_can_be_read_on_any_interface() -> None:
    """Of tensors, of the token, of names; and without a secret all of that can be."""
    run_in_a_new_network("tests.support.sniffed_job", timeout=120)


def rank_meets(rank: int, world: int) -> None:
    init()


def test_ranks_of_different_secrets_say_so_and_name_who_differs() -> None:
    other = {2: {"LOSSYCOLL_SECRET": "another secret of tests"}}
    outcomes = run_ranks(rank_meets, 3, SECRET, per_rank=other)
    for one in outcomes:
        assert one.error == "RendezvousError", str(one)
        assert f"rank {one.rank}/3" in one.text
        assert "the secrets of rank 0 and rank 2 differ" in one.text
        assert "set LOSSYCOLL_SECRET or LOSSYCOLL_SECRET_FILE to the same" in one.text


@pytest.mark.in_clear
@pytest.mark.long
def test_a_rank_without_a_secret_is_told() -> None:
    secrets = dict.fromkeys((0, 1), SECRET)
    outcomes = run_ranks(rank_meets, 3, {"LOSSYCOLL_LINK": "udp"}, per_rank=secrets)
    for one in outcomes:
        assert one.error == "RendezvousError", str(one)
        assert "the secrets of rank 0 and rank 2 differ, or only one of them has one" in one.text


@pytest.mark.in_clear
def test_a_secret_file_that_others_can_read_ends_the_job(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET["LOSSYCOLL_SECRET"])
    file.chmod(0o644)
    good = {0: SECRET, 1: {"LOSSYCOLL_SECRET_FILE": str(file)}}
    outcomes = run_ranks(rank_meets, 2, {"LOSSYCOLL_LINK": "udp"}, per_rank=good)
    assert [one.error for one in outcomes] == ["RendezvousError", "OptionError"]
    assert f"rank 1/2: LOSSYCOLL_SECRET_FILE is {file}" in outcomes[1].text
    assert f"chmod 600 {file}" in outcomes[1].text
    file.chmod(0o600)
    run_good(rank_meets, 2, {"LOSSYCOLL_LINK": "udp"}, per_rank=good)


def rank_has_a_secret_later(rank: int, world: int) -> list[bool]:
    init(backend="gloo")
    found = []
    for secret in (None, SECRET["LOSSYCOLL_SECRET"], SECRET["LOSSYCOLL_SECRET"]):
        if secret is not None:
            os.environ["LOSSYCOLL_SECRET"] = secret
        group = dist.new_group(backend="lossy")
        total = torch.ones(1000)
        dist.all_reduce(total, group=group)
        assert (total == world).all()
        found.append(group._group._host.is_sealed)
    dist.destroy_process_group()
    return found


@pytest.mark.in_clear
def test_a_group_that_is_made_when_there_is_a_secret_shares_no_host_in_clear() -> None:
    assert run_good(rank_has_a_secret_later, 2) == [[False, True, True]] * 2


def rank_splits_a_group_in_clear(rank: int, world: int) -> str:
    init()
    os.environ["LOSSYCOLL_SECRET"] = SECRET["LOSSYCOLL_SECRET"]
    with pytest.raises(lossycoll.OptionError) as caught:
        dist.new_group()
    dist.barrier()  # the group itself goes on
    own = dist.new_group(pg_options=lossycoll.Options(seal="authenticate"))
    assert own._group._host.is_sealed, "it has a socket of its own"
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.in_clear
def test_a_part_of_a_group_in_clear_is_refused_once_there_is_a_secret() -> None:
    for rank, error in enumerate(run_good(rank_splits_a_group_in_clear, 2)):
        assert f"rank {rank}/2: a secret is set now, and was not when" in error
        assert "set it before init_process_group" in error


def rank_forgets_the_secret(rank: int, world: int) -> bool:
    init()
    del os.environ["LOSSYCOLL_SECRET"]
    part = dist.new_group()
    sealed: bool = part._group._host.is_sealed
    dist.destroy_process_group()
    return sealed


@pytest.mark.long
def test_a_part_of_a_sealed_group_is_sealed_though_the_variable_is_gone() -> None:
    assert run_good(rank_forgets_the_secret, 2, SECRET) == [True, True]


def test_without_a_secret_rank_0_of_several_machines_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_steps, "_warned", [])
    here, there = ["10.0.0.1:5", "10.0.0.1:6"], ["10.0.0.1:5", "10.0.0.2:5", "10.0.0.2:6"]
    for rank, addresses in ((0, here), (1, there)):
        warn_of_clear(Where(rank, len(addresses)), addresses)
    assert not caplog.records
    for _ in range(2):
        warn_of_clear(Where(0, 3), there)
    assert len(caplog.records) == 1
    assert "rank 0/3: nothing is sealed between 2 addresses" in caplog.text
    assert "`lossycoll keygen`" in caplog.text

"""A running job takes new keys, asked for by a rank or by the command."""

from __future__ import annotations

import pytest

from lossycoll.cli.answer import EXIT_FAILED
from lossycoll.cli.main import EXIT_USAGE, main
from tests.support.harness import init, run_good

SECRET = {"LOSSYCOLL_SECRET": "a secret of tests", "LOSSYCOLL_LINK": "udp"}


def rank_takes_new_keys(rank: int, world: int) -> int:
    import torch
    import torch.distributed as dist

    import lossycoll
    from lossycoll.runtime.engine.host import Host
    from tests.support.waiting import until

    renewed, renew = [], Host.rekey

    def counted(host: Host) -> None:
        renew(host)
        renewed.append(host)

    Host.rekey = counted  # type: ignore[method-assign]
    init()
    place = dist.distributed_c10d._get_default_group()._group.as_parent.world.plane.place_of(
        world - 1
    )
    for number in range(3):
        if (number, rank) == (0, 1) or (number, rank) == (1, 0):
            lossycoll.rekey()
        elif (number, rank) == (2, 1):
            assert main(["rekey", f"{place[0]}:{place[1]}"]) == 0
        until(lambda n=number: len(renewed) > n)  # type: ignore[misc]
        total = torch.ones(100_000)
        with lossycoll.reliable():
            dist.all_reduce(total)
        assert (total == world).all()
    dist.destroy_process_group()
    return len(renewed)


def test_one_rank_or_the_command_has_all_ranks_take_new_keys() -> None:
    assert run_good(rank_takes_new_keys, 3, SECRET) == [3, 3, 3]


def test_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOSSYCOLL_SECRET", raising=False)
    assert main(["rekey", "127.0.0.1:1"]) == EXIT_USAGE
    assert "set LOSSYCOLL_SECRET or LOSSYCOLL_SECRET_FILE" in capsys.readouterr().err
    monkeypatch.setenv("LOSSYCOLL_SECRET", SECRET["LOSSYCOLL_SECRET"])
    assert main(["rekey", "nowhere"]) == EXIT_USAGE
    assert "'nowhere' is no HOST:PORT" in capsys.readouterr().err
    assert main(["rekey", "127.0.0.1:1"]) == EXIT_FAILED
    assert "nobody can be reached at 127.0.0.1:1: Connection refused" in capsys.readouterr().err

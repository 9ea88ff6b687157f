"""Options: the table, where values come from, what is refused, and blocks of code."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import lossycoll
from lossycoll.errors import OptionError
from lossycoll.options.fields import BUILD_VARIABLES, Options, scope, table, variable, within

DOCS = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_the_documented_table_is_the_one_that_is_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "lossycoll.options.fields"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed == table()
    assert printed in DOCS.read_text(encoding="utf-8")


def test_every_option_has_a_row_a_variable_and_a_default_that_is_allowed() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(fields(Options))
    for entry, row in zip(fields(Options), rows[2:], strict=True):
        assert f"`{entry.name}`" in row
        assert f"`LOSSYCOLL_{entry.name.upper()}`" in row
        assert len(entry.metadata["meaning"]) > 20
    assert Options() == Options.from_env({})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("algorithm", "ring", "ring"),
        ("delivery", "reliable", "reliable"),
        ("repair", "2", 2),
        ("fec", "0.1", 0.1),
        ("lossy_min_bytes", "0x100", 256),
        ("bulk_min_bytes", "1048576", 1 << 20),
        ("on_missing", "keep", "keep"),
        ("estimator", "count", "count"),
        ("deadline_min", "0.5", 0.5),
        ("deadline_max", "60", 60.0),
        ("reorder_min", "0.01", 0.01),
        ("interface", "eth0", "eth0"),
        ("port_range", "40000-40100", "40000-40100"),
        ("mtu", "9000", 9000),
        ("socket_buffer", "1000000", 1_000_000),
        ("eager", "65536", 65536),
        ("disable", "gso, gro", "gso,gro"),
        ("pace", "1e9", 1e9),
        ("inject", "loss=0.1,burst=8,seed=7", "loss=0.1,burst=8,seed=7"),
        ("seed", str((1 << 64) - 1), (1 << 64) - 1),
        ("futures", "in_order", "in_order"),
        ("liveness", "2", 2.0),
        ("on_peer_loss", "continue", "continue"),
        ("log", "off", "off"),
    ],
)
def test_a_value_comes_from_the_environment_or_from_the_user(
    name: str, text: str, value: Any
) -> None:
    from_env = Options.from_env({variable(name): text})
    assert getattr(from_env, name) == value
    given = value if name != "disable" else text
    assert Options(**{name: given}) == from_env


def test_what_gloo_serves_cannot_outlive_a_rank() -> None:
    with pytest.raises(OptionError, match=r"bulk_min_bytes is 4096, wanted 0 with on_peer_loss"):
        Options(on_peer_loss="continue", bulk_min_bytes=4096)


def test_a_lossy_block_cannot_be_reliable() -> None:
    with pytest.raises(OptionError, match=r"'reliable'.*lossycoll\.reliable\(\)"):
        lossycoll.lossy(delivery="reliable")
    with lossycoll.lossy(delivery="lossy", repair=1):
        found = scope()
    assert found is not None
    assert dict(found.changes)["delivery"] == "lossy"


def test_every_option_is_in_the_test_above() -> None:
    (mark,) = test_a_value_comes_from_the_environment_or_from_the_user.pytestmark
    assert [case[0] for case in mark.args[1]] == [entry.name for entry in fields(Options)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("algorithm", "tree"),
        ("delivery", ""),
        ("repair", "256"),
        ("repair", "-1"),
        ("repair", "1.5"),
        ("fec", "0.001"),
        ("fec", "1.5"),
        ("fec", "-0.1"),
        ("fec", "nan"),
        ("fec", "much"),
        ("lossy_min_bytes", "16 KiB"),
        ("on_missing", "nothing"),
        ("estimator", "mean"),
        ("deadline_min", "0"),
        ("deadline_min", "nan"),
        ("deadline_max", "inf"),
        ("interface", " "),
        ("port_range", "5-3"),
        ("port_range", "0-9"),
        ("port_range", "a-b"),
        ("port_range", "70000-70001"),
        ("mtu", "575"),
        ("mtu", "65536"),
        ("socket_buffer", "-1"),
        ("disable", "gso,tso"),
        ("pace", "-1"),
        ("inject", "loss=2"),
        ("inject", "loss"),
        ("inject", "los=0.1"),
        ("inject", "loss=0.1,loss=0.2"),
        ("inject", "loss=0.9,burst=2"),
        ("inject", "link=0-0:0.1"),
        ("seed", "-1"),
        ("liveness", "0.1"),
        ("log", "verbose"),
    ],
)
def test_a_bad_value_is_refused_by_name_value_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_env({variable(name): text})
    assert f"variable {variable(name)} is " in str(caught.value)
    assert ", wanted " in str(caught.value)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(OptionError, match=f"option {name} is "):
        Options(**{name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repair", True),
        ("repair", 1.0),
        ("fec", True),
        ("fec", None),
        ("pace", True),
        ("delivery", None),
        ("interface", 3),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"option {name} is "):
        Options(**{name: value})


def test_a_share_of_parity_is_the_nearest_size_of_sets() -> None:
    sizes = {0: 0, 0.002: 500, 0.01: 100, 0.05: 20, 0.1: 10, 0.19: 5, 0.2: 5, 0.3: 3, 0.5: 2, 1: 1}
    assert {share: Options(fec=share).parity_sets for share in sizes} == {
        share: (size, False) for share, size in sizes.items()
    }
    assert Options.from_env({"LOSSYCOLL_FEC": " auto "}).parity_sets == (4, True)
    with pytest.raises(OptionError, match=r"option fec is 0\.001, wanted 0, 0\.002 to 1, or auto"):
        Options(fec=0.001)


def test_deadlines_must_be_in_order() -> None:
    with pytest.raises(OptionError, match="deadline_max is 1 s, wanted at least deadline_min, 2 s"):
        Options(deadline_min=2, deadline_max=1)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LOSSYCOLL_INJCET", "did you mean LOSSYCOLL_INJECT?"),
        ("LOSSYCOLL_DEADLINE", "did you mean LOSSYCOLL_DEADLINE_M"),
        ("LOSSYCOLL_repair", "LOSSYCOLL_REPAIR"),
        ("LOSSYCOLL_", "LOSSYCOLL_"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(OptionError, match=f"unknown variable {name};") as caught:
        Options.from_env({name: "1"})
    assert near in str(caught.value)


def test_variables_of_the_build_and_of_others_are_let_through() -> None:
    environ = dict.fromkeys([*BUILD_VARIABLES, "LOSSY", "PATH"], "x")
    assert Options.from_env(environ) == Options()


def test_what_is_written_beats_the_environment_which_beats_the_default() -> None:
    environ = {"LOSSYCOLL_DELIVERY": "reliable", "LOSSYCOLL_REPAIR": "3"}
    for pg_options in (Options(delivery="lossy"), {"delivery": "lossy"}):
        found = Options.resolve(pg_options, environ)
        assert found.delivery == "lossy"  # written, though it is the default
        assert found.repair == 3
    assert Options.resolve(None, environ).delivery == "reliable"
    assert Options.from_env(environ, repair=1).repair == 1
    # A bad variable does not matter where another value is written.
    assert Options.resolve({"repair": 1}, {"LOSSYCOLL_REPAIR": "x"}).repair == 1


def test_pg_options_of_other_types_and_names_are_refused() -> None:
    with pytest.raises(OptionError, match=r"pg_options is of type int, wanted lossycoll\.Options"):
        Options.resolve(3, {})
    with pytest.raises(OptionError, match=r"unknown option repiar; did you mean repair\?"):
        Options.resolve({"repiar": 1}, {})
    with pytest.raises(TypeError, match="repiar"):
        Options(repiar=1)  # type: ignore[call-arg]


def test_options_are_values() -> None:
    options = Options(repair=2)
    with pytest.raises(FrozenInstanceError):
        options.repair = 3  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options
    assert hash(copy) == hash(options)
    assert b"_hash" not in pickle.dumps(options)  # another process hashes strings otherwise
    assert Options.resolve(copy, {"LOSSYCOLL_REPAIR": "5"}).repair == 2
    assert Options(port_range="10-20").ports == (10, 20)
    assert Options().ports == (0, 0)
    assert Options(disable="gso,simd").disabled == ("gso", "simd")


def test_what_ranks_must_agree_on_is_told_apart() -> None:
    shared = Options(repair=2).shared()
    assert shared["repair"] == 2
    assert {"algorithm", "delivery", "inject", "seed", "on_missing", "liveness"} <= set(shared)
    assert not {"interface", "port_range", "mtu", "socket_buffer", "log"} & set(shared)


# ---- blocks ----


def test_blocks_change_options_and_nest() -> None:
    base = Options(repair=1)
    assert scope() is None
    with lossycoll.reliable():
        assert within(base, scope()) == Options(repair=1, delivery="reliable")
        with lossycoll.lossy(repair=4, on_missing="keep"):
            inner = within(base, scope())
            assert (inner.delivery, inner.repair, inner.on_missing) == ("lossy", 4, "keep")
            assert scope().lossy_copies
            with lossycoll.reliable():
                assert within(base, scope()).repair == 4
                assert within(base, scope()).delivery == "reliable"
                assert not scope().lossy_copies
        assert within(base, scope()).repair == 1
    assert scope() is None
    assert within(base, None) is base


def test_a_block_is_left_by_an_exception_too() -> None:
    with pytest.raises(KeyError), lossycoll.lossy():
        raise KeyError
    assert scope() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repair": 300}, "option repair is 300, wanted 0 to 255"),
        ({"interface": "eth0"}, "unknown option of a block interface; "),
        ({"repiar": 1}, r"did you mean repair\?"),
    ],
)
def test_a_block_refuses_what_is_no_option_of_a_call(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text), lossycoll.lossy(**changes):
        pass
    assert scope() is None


def test_a_block_holds_in_its_thread_and_task_alone() -> None:
    seen: list[Any] = []

    async def other() -> None:
        seen.append(scope())

    async def task() -> None:
        waiting = asyncio.ensure_future(other())
        with lossycoll.reliable():
            await waiting

    with lossycoll.reliable():
        thread = threading.Thread(target=lambda: seen.append(scope()))
        thread.start()
        thread.join()
    asyncio.run(task())
    assert seen == [None, None]


def test_no_variable_of_this_machine_is_unknown() -> None:
    Options.from_env(os.environ)

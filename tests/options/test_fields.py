"""Options: where values come from, and what they are."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.schema import variable
from lossycoll.options.texts import OTHER_VARIABLES
from lossycoll.plan.sets import Code


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("algorithm", "ring", "ring"),
        ("delivery", "reliable", "reliable"),
        ("repair", "2", 2),
        ("fec", "0.1", 0.1),
        ("max_missing", "0.01", 0.01),
        ("stream_packets", "128", 128),
        ("finer_packets", "2", 2),
        ("lossy_min_bytes", "0x100", 256),
        ("wire", "bf16", "bf16"),
        ("wire_group", "32", 32),
        ("wire_spikes", "1", 1),
        ("wire_rounding", "stochastic", "stochastic"),
        ("on_missing", "keep", "keep"),
        ("estimator", "count", "count"),
        ("deterministic", "1", 1),
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
        ("pacing", "path", "path"),
        ("keepalive", "2.5", 2.5),
        ("inject", "loss=0.1,burst=8,seed=7", "loss=0.1,burst=8,seed=7"),
        ("seed", str((1 << 64) - 1), (1 << 64) - 1),
        ("futures", "in_order", "in_order"),
        ("liveness", "2", 2.0),
        ("on_peer_loss", "continue", "continue"),
        ("link", "udp", "udp"),
        ("verbs_device", "mlx5_0:1", "mlx5_0:1"),
        ("verbs_gid", "3", 3),
        ("libibverbs", "/opt/libibverbs.so.1", "/opt/libibverbs.so.1"),
        ("host", " left ", "left"),
        ("site", "east", "east"),
        ("seal", "authenticate", "authenticate"),
        ("cipher", "aes-256-gcm", "aes-256-gcm"),
        ("libcrypto", "/opt/libcrypto.so.3", "/opt/libcrypto.so.3"),
        ("rekey", "60", 60.0),
        ("status", "off", "off"),
        ("warn_after", "60", 60.0),
        ("metrics", ":9400", ":9400"),
        ("replace", "gloo", "gloo"),
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


@pytest.mark.parametrize("name", ["wire_spikes", "deterministic"])
def test_a_switch_takes_true_and_false(name: str) -> None:
    for value in (False, True):
        options = Options(**{name: value})
        assert getattr(options, name) == value
        assert type(getattr(options, name)) is int
        assert options == Options(**{name: int(value)})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("fec", "10%", 0.1), ("fec", " 12.5% ", 0.125), ("max_missing", "1%", 0.01)],
)
def test_a_share_may_be_percent(name: str, text: str, value: float) -> None:
    assert getattr(Options.from_env({variable(name): text}), name) == value
    assert getattr(Options(**{name: text}), name) == value


@pytest.mark.parametrize("value", [10**400, -(10**5000), Fraction(10**400), 1e400], ids=type)
def test_a_number_that_no_float_can_be_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"option pace is .*, wanted 0 to 1e\+12 bytes/s"):
        Options(pace=value)
    for name in ("max_missing", "repair"):
        with pytest.raises(OptionError, match=f"option {name} is "):
            Options(**{name: value})


@pytest.mark.parametrize("text", ["%", "1%%", "101%", "-1%", "nan%"])
def test_a_share_of_percent_has_the_same_range(text: str) -> None:
    with pytest.raises(OptionError, match=r"option max_missing is .*, wanted 0, 0.0001 to 1, or"):
        Options(max_missing=text)


def test_every_option_is_in_the_test_above() -> None:
    (mark,) = test_a_value_comes_from_the_environment_or_from_the_user.pytestmark
    assert [case[0] for case in mark.args[1]] == [entry.name for entry in fields(Options)]


def test_a_share_of_parity_is_the_nearest_code() -> None:
    codes = {
        0: (0, 0),
        0.002: (224, 1),
        0.01: (96, 1),
        0.05: (64, 3),
        0.1: (64, 6),
        0.2: (64, 13),
        0.5: (64, 31),
        1: (64, 64),
    }
    assert {share: Options(fec=share).recovery for share in codes} == {
        share: (Code(*code), 0, -1.0) for share, code in codes.items()
    }
    assert Options.from_env({"LOSSYCOLL_FEC": " auto "}).recovery == (Code(), 16, -1.0)
    with pytest.raises(OptionError, match=r"option fec is 0\.001, wanted 0, 0\.002 to 1, or auto"):
        Options(fec=0.001)


def test_parity_is_chosen_to_meet_what_may_be_missing_unless_it_is_given() -> None:
    assert Options(max_missing=0.03).recovery == (Code(), 64, 0.03)
    assert Options(max_missing=0).recovery == (Code(), 64, 0.0)
    assert Options(max_missing=0.03, fec="auto").recovery == (Code(), 16, 0.03)
    assert Options(max_missing=0.03, fec=0.1).recovery == (Code(64, 6), 0, 0.03)
    assert Options(max_missing=0.03, fec=0).recovery == (Code(), 0, 0.03)
    assert Options(max_missing="none").recovery == Options().recovery == (Code(), 0, -1.0)
    assert Options(max_missing=0.03).chooses_rounds
    assert not Options(max_missing=0.03, repair=0).chooses_rounds
    assert not Options().chooses_rounds


def test_deadlines_must_be_in_order() -> None:
    with pytest.raises(OptionError, match="deadline_max is 1 s, wanted at least deadline_min, 2 s"):
        Options(deadline_min=2, deadline_max=1)


def test_variables_of_the_build_and_of_others_are_let_through() -> None:
    environ = dict.fromkeys([*OTHER_VARIABLES, "LOSSY", "PATH"], "x")
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
        Options(repiar=1)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"unknown option repiar; did you mean repair\?"):
        Options.resolve({"repiar": 1}, {})


def test_options_are_values() -> None:
    options = Options(repair=2)
    with pytest.raises(FrozenInstanceError):
        options.repair = 3  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options
    assert hash(copy) == hash(options)
    assert Options.resolve(copy, {"LOSSYCOLL_REPAIR": "5"}).repair == 2
    assert Options(port_range="10-20").ports == (10, 20)
    assert Options().ports == (0, 0)
    assert Options(disable="gso,simd").disabled == ("gso", "simd")


def test_options_are_found_again_in_another_process() -> None:
    """There the hashes of strings are others."""
    code = (
        "import pickle, sys; from lossycoll import Options;"
        "sent = pickle.load(sys.stdin.buffer);"
        "print({Options(interface='eth0', repair=2): 'found'}[sent], sorted(sent.given))"
    )
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(Options(interface="eth0", repair=2)),
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert there.stdout.decode().strip() == "found ['interface', 'repair']"


def test_what_was_given_is_distinguished_from_what_is_in_effect() -> None:
    assert Options().given == frozenset()
    assert Options(delivery="lossy").given == {"delivery"}  # written, though it is the default
    assert Options(delivery="lossy") != Options()  # others may choose what isn't set
    environ = {"LOSSYCOLL_SEED": "3", "LOSSYCOLL_REPAIR": "2"}
    found = Options.resolve(Options(repair=1), environ)
    assert (found.repair, found.seed, found.mtu) == (1, 3, 0)
    assert found.given == {"repair", "seed"}
    assert found.is_given("seed")
    assert not found.is_given("mtu")


def test_replaced_options_keep_what_was_given() -> None:
    changed = replace(Options(seed=3), repair=0)
    assert changed.given == {"seed", "repair"}
    assert replace(pickle.loads(pickle.dumps(changed)), mtu=0).given == {"seed", "repair", "mtu"}
    environ = {"LOSSYCOLL_FEC": "0.1", "LOSSYCOLL_REPAIR": "2"}
    found = Options.resolve(replace(Options(), repair=1), environ)
    assert (found.repair, found.fec) == (1, 0.1)


@pytest.mark.parametrize("entry", fields(Options), ids=lambda entry: entry.name)
def test_a_default_that_is_written_is_the_default(entry: Any) -> None:
    written = Options(**{entry.name: plain(entry.default)})
    assert getattr(written, entry.name) == getattr(Options(), entry.name)
    assert written.given == {entry.name}
    assert written != Options()
    assert len({written, Options(), replace(Options(), **{entry.name: plain(entry.default)})}) == 2


def plain(default: Any) -> Any:
    """A default as a user writes it: of Python's own type."""
    return next(kind(default) for kind in (int, float, str) if isinstance(default, kind))


def test_equal_options_have_equal_hashes() -> None:
    assert Options(fec=-0.0) == Options(fec=0.0) == replace(Options(), fec=0)
    assert hash(Options(fec=-0.0)) == hash(Options(fec=0.0)) == hash(replace(Options(), fec=0))
    assert Options(fec=0.0) != "fec"


def test_numbers_may_be_those_of_numpy() -> None:
    numbers: Any = {"repair": np.int64(2), "fec": np.float32(0.5), "seed": np.uint64(2**64 - 1)}
    options = Options(**numbers)
    assert options == Options(repair=2, fec=0.5, seed=2**64 - 1)
    assert hash(options) == hash(Options(repair=2, fec=0.5, seed=2**64 - 1))
    assert type(options.repair) is int
    assert type(options.fec) is float
    for wrong in (np.int64(256), np.float64(2), np.bool_(True)):
        with pytest.raises(OptionError, match="wanted 0 to 255"):
            Options(**{"repair": wrong})


def test_the_variables_of_this_process_are_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.from_env() == Options.from_env(os.environ)
    monkeypatch.setenv("LOSSYCOLL_REPAIR", "7")
    assert Options.from_env().repair == 7


@pytest.mark.parametrize("name", ["secret", "secret_file"])
def test_a_secret_among_options_is_told_of_its_variable(name: str) -> None:
    written: dict[str, Any] = {name: "x" * 16}
    with pytest.raises(OptionError, match=f"set LOSSYCOLL_{name.upper()}$"):
        Options(**written)

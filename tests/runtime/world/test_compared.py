"""What all ranks must have alike, and who is refused for what."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from lossycoll.errors import RendezvousError
from lossycoll.options.fields import COUNT_AS_GIVEN, GIVEN, Options
from lossycoll.options.schema import variable
from lossycoll.runtime.world.comparison import compare_options, compare_versions, difference
from lossycoll.runtime.world.messages import Defined
from tools.options_table import table

NOT_SHARED = {
    *("deadline_min", "deadline_max", "reorder_min", "interface", "port_range", "mtu"),
    *(
        "socket_buffer",
        "disable",
        "pace",
        "pacing",
        "log",
        "link",
        "host",
        "site",
        "libcrypto",
        "rekey",
        "replace",
    ),
    *("keepalive", "status", "warn_after", "metrics"),
    *("verbs_device", "verbs_gid", "libibverbs"),
}


OTHERS: dict[str, Any] = {
    "algorithm": "ring",
    "delivery": "reliable",
    "repair": 2,
    "fec": 0.5,
    "max_missing": 0.03,
    "stream_packets": 64,
    "finer_packets": 2,
    "lossy_min_bytes": 1,
    "wire": "fp16",
    "wire_group": 32,
    "wire_spikes": 1,
    "wire_rounding": "stochastic",
    "on_missing": "zero",
    "estimator": "zero_fill",
    "eager": 0,
    "seal": "authenticate",
    "cipher": "aes-256-gcm",
    "inject": "loss=0.25",
    "seed": 9,
    "futures": "in_order",
    "deterministic": 1,
    "liveness": 20.0,
    "on_peer_loss": "continue",
}
"""Values that aren't the defaults."""
SET = Options(repair=0)


def test_versions_whose_packets_differ_refuse_each_other() -> None:
    """Otherwise each would count all that the other sends as malformed, until a timeout."""
    compare_versions(1, [["0.1.0", 2], ["0.1.1", 2]])
    for rank, theirs, named in ((0, ["0.2.0", 3], "0.2.0 (wire 3)"), (1, None, "too old to say")):
        with pytest.raises(RendezvousError) as caught:
            compare_versions(rank, [["0.1.0", 2], ["0.1.0", 2], theirs])
        assert caught.value.peer == 2
        assert f"rank {rank}/3: rank 2's version of lossycoll is {named}" in str(caught.value)
        assert "rank 0's is 0.1.0 (wire 2)" in str(caught.value)


def test_the_options_that_ranks_compare_are_those_that_the_table_marks() -> None:
    names = {entry.name for entry in fields(Options)}
    rows = [row.split(" | ") for row in table().splitlines()[2:]]
    marked = {row[0].strip("| `") for row in rows if row[-2].strip() == "yes"}
    assert set(Options().shared()) - {GIVEN} == marked == names - NOT_SHARED == set(OTHERS)
    assert set(COUNT_AS_GIVEN) < marked


@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_that_differs_is_refused_by_the_name_of_the_option(name: str) -> None:
    usual, other = Options().shared(), Options(**{name: OTHERS[name]}).shared()
    compare_options(0, [usual, usual, usual])
    for rank in range(3):
        with pytest.raises(RendezvousError) as caught:
            compare_options(rank, [usual, usual, other])
        assert caught.value.peer == 2
        assert f"rank {rank}/3: option {name} is {OTHERS[name]!r} on rank 2" in str(caught.value)
        assert f"{usual[name]!r} on rank 0" in str(caught.value)
        assert variable(name) in str(caught.value)


@pytest.mark.parametrize("name", COUNT_AS_GIVEN)
def test_a_default_that_is_set_on_one_rank_alone_is_refused(name: str) -> None:
    """Plans depend on it: without ``repair``, ``max_missing`` chooses the rounds."""
    given = Options.from_env({variable(name): str(getattr(Options(), name))})
    value = getattr(given, name)
    compare_options(0, [given.shared(), Options(**{name: value}).shared()])
    for ranks, said in (
        ([Options(), given], f"{value!r} on rank 1 but not set on rank 0"),
        ([given, Options()], f"not set on rank 1 but {value!r} on rank 0"),
    ):
        for rank in range(2):
            with pytest.raises(RendezvousError) as caught:
                compare_options(rank, [one.shared() for one in ranks])
            assert f"rank {rank}/2: option {name} is {said}; set {variable(name)} or " in str(
                caught.value
            )


def test_a_value_that_differs_goes_before_one_that_is_set() -> None:
    ranks = [Options(repair=0, seed=1).shared(), Options(fec=0, seed=2).shared()]
    with pytest.raises(RendezvousError, match="option seed is 2 on rank 1 but 1 on rank 0"):
        compare_options(0, ranks)


def test_definitions_differ_by_what_is_set() -> None:
    one, other = (Defined(r, (4, 7), o.shared()) for r, o in enumerate((Options(), SET)))
    assert one.digest != other.digest
    assert difference(one, other) == difference(other, one)
    assert difference(one, other).startswith("option repair is 0 on rank 1 but not set on rank 0;")

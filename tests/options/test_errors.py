"""What is refused, and how it is said."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

import lossycoll
from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.schema import variable


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("algorithm", "star"),
        ("delivery", ""),
        ("repair", "256"),
        ("repair", "-1"),
        ("repair", "1.5"),
        ("fec", "0.001"),
        ("fec", "1.5"),
        ("fec", "-0.1"),
        ("fec", "nan"),
        ("fec", "much"),
        ("max_missing", "1.5"),
        ("max_missing", "-0.1"),
        ("max_missing", "nan"),
        ("max_missing", "auto"),
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
        ("link", "shm"),
        ("site", "a" * 65),
        ("host", "a\nb"),
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
        ("max_missing", None),
        ("pace", True),
        ("delivery", None),
        ("interface", 3),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"option {name} is "):
        Options(**{name: value})


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


def test_an_error_names_the_rank_where_a_launcher_has_set_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(OptionError, match=r"^rank 1/4: option repair is 300, wanted") as caught:
        Options(repair=300)
    assert caught.value.reason == "option repair is 300, wanted 0 to 255"
    with pytest.raises(OptionError, match=r"^rank 1/4: unknown option repiar; did you mean"):
        Options.resolve({"repiar": 1}, {})
    with pytest.raises(OptionError, match=r"^rank 1/4: variable LOSSYCOLL_SEED is 'x', wanted"):
        Options.from_env({"LOSSYCOLL_SEED": "x"})
    with pytest.raises(OptionError, match=r"^rank 1/4: option delivery"):
        lossycoll.lossy(delivery="reliable")
    with pytest.raises(OptionError, match=r"^rank 1/4: ") as caught, lossycoll.lossy(repair=-1):
        pass
    assert "rank" not in pickle.loads(pickle.dumps(caught.value)).reason
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(OptionError, match=r"^option repair is 300"):
        Options(repair=300)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("inject", "0.1", "did you mean loss=0.1?"),
        ("inject", "loss", "'loss' in 'loss': wanted name=value with a known name"),
        ("inject", "loss=2", "loss is 2.0, wanted 0 to 1"),
        ("port_range", "40000", "as in 40000-40100"),
        ("port_range", "a-b", "as in 40000-40100"),
        ("port_range", "1-2-3", "as in 40000-40100"),
        ("port_range", "5-3", "lo is at most hi, both are 1 to 65535"),
    ],
)
def test_what_is_wrong_stands_out(name: str, text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_env({variable(name): text})
    assert f"({says})" in str(caught.value).replace(f"{text!r}: {says}", says)
    assert len(str(caught.value)) < 200
    assert "unpack" not in str(caught.value)


def test_a_group_names_its_rank_once() -> None:
    code = (
        "import torch.distributed as dist\n"
        "try:\n"
        "    dist.init_process_group('lossy', store=dist.HashStore(), rank=0, world_size=1,\n"
        "                            pg_options={'repair': 300})\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    environ = {**os.environ, "RANK": "3", "WORLD_SIZE": "4"}  # of the job; the group has its own
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert said.stdout.strip() == "rank 0/1: option repair is 300, wanted 0 to 255"


@pytest.mark.parametrize(
    "name",
    [
        "LOSSYCOLL_SERVICE_HOST",
        "LOSSYCOLL_SERVICE_PORT",
        "LOSSYCOLL_SERVICE_PORT_HTTP",
        "LOSSYCOLL_PORT",
        "LOSSYCOLL_PORT_29500_TCP",
        "LOSSYCOLL_PORT_29500_TCP_ADDR",
        "LOSSYCOLL_PORT_29500_UDP_PROTO",
        "LOSSYCOLL_HEAD_SERVICE_HOST",
        "LOSSYCOLL_HEAD_PORT",
    ],
)
def test_a_variable_of_a_service_of_kubernetes_is_named_as_that(name: str) -> None:
    with pytest.raises(OptionError, match=f"unknown variable {name}, which Kubernetes") as caught:
        Options.from_env({name: "tcp://10.0.0.5:29500"})
    assert "enableServiceLinks: false" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_a_slip_is_not_taken_for_kubernetes() -> None:
    with pytest.raises(OptionError, match="did you mean LOSSYCOLL_PORT_RANGE"):
        Options.from_env({"LOSSYCOLL_PORT_RANG": "1-2"})

"""What a rank learns of its contribution to a mean that travels in few bits: what isn't in it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.delivery import Wire
from lossycoll.train.compress.step import mean, padded
from tests.support.harness import EXACT, run_good

ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_MTU": "576"}
LOSSES = {"link": "udp", "inject": "loss=0.3,seed=11"}
COUNT = 7000


@pytest.mark.parametrize(
    ("wire", "gradients", "parameters"),
    [
        (None, None, "same"),
        ("int8", "int8", "int8"),
        ("int4/int8", "int4", "int8"),
        ("same/bf16", "same", "bf16"),
        ("int2/same", "int2", "same"),
    ],
)
def test_what_the_argument_means(wire: str | None, gradients: str, parameters: str) -> None:
    assert Wire.of(wire) == Wire(gradients, parameters)


@pytest.mark.parametrize("wire", ["int9", "fp16", "", "int8/", "int8/int4/int2", 8, ["int8"]])
def test_what_is_refused(wire: Any) -> None:
    with pytest.raises(lossycoll.OptionError, match=r"wire is .*, wanted None, or one of same, b"):
        Wire.of(wire)


def made(rank: int, **options: Any) -> None:
    hosts = os.environ["HOSTS"]
    if hosts:
        options |= {
            "link": "auto",
            "host": hosts[rank],
            "site": os.environ["SITES"][rank : rank + 1],
        }
    chosen = lossycoll.Options(lossy_min_bytes=0, **options)
    dist.init_process_group("lossy", pg_options=chosen, timeout=timedelta(seconds=60))
    if hosts:
        assert lossycoll.topology().n_hosts == len(set(hosts))


def rank_sums_up(rank: int, world: int) -> dict[str, dict[str, float]]:
    """By wire: how far what counts as delivered, over all ranks, is from what the mean says."""
    losses = LOSSES if os.environ["LOSES"] else {}
    made(rank, delivery=os.environ["DELIVERY"], **losses)
    out = {}
    for wire in ("int8", "int4/int8", "int2/same", "bf16", "same/int4"):
        here = Collectives(None, wire=Wire.of(wire))
        draw = torch.Generator().manual_seed(rank)
        own = padded(here, COUNT, torch.zeros(1))
        own[:COUNT] = torch.randn(COUNT, generator=draw)
        before = own.clone()
        found = mean(here, own, feedback=True)
        assert own.equal(before)
        said = torch.stack(list(here.all_gather(found.delivered))).double().mean(0)
        rows = here.all_gather(found.values)
        exact = here.all_gather(own).double().mean(0)
        out[wire] = {
            "unsaid": float((said - found.values).abs().max()),
            "rounded": float((exact - found.values).abs().max()),
            "unlike": float((rows - rows[0]).abs().max()),
        }
        with lossycoll.reliable():  # says that nothing is rounded, whatever the method asks for
            found = mean(here, own, feedback=True)
        out[wire]["in reliable()"] = float((exact - found.values).abs().max())
    out["lost"] = {"packets": lossycoll.stats().packets_injected}
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize(
    ("hosts", "delivery", "loses"),
    [
        ("", "lossy", True),
        ("aabb", "lossy", False),
        ("aab", "reliable", False),
        ("aabcd/xxxyy", "lossy", False),
        ("aaa", "lossy", False),
    ],
)
def test_the_mean_is_that_of_what_counts_as_delivered(
    hosts: str, delivery: str, loses: bool
) -> None:
    hosts, _, sites = hosts.partition("/")
    env = {
        **ENV,
        "HOSTS": hosts,
        "SITES": sites,
        "DELIVERY": delivery,
        "LOSES": "1" if loses else "",
    }
    env |= EXACT if hosts else {"LOSSYCOLL_LINK": "udp"}
    one_host = len(set(hosts)) == 1
    ranks = run_good(rank_sums_up, len(hosts) or 3, env)
    assert (sum(found.pop("lost")["packets"] for found in ranks) > 0) == loses
    for found in ranks:
        for wire, how in found.items():
            assert how["unsaid"] < 3e-6, wire
            assert (how["rounded"] > 1e-3) == (not one_host), "nothing was rounded"
            assert how["unlike"] == 0, "replicas differ"
            assert how["in reliable()"] < 1e-6

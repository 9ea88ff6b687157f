"""A rank of benchmarks.micro.learnt_sites: ``python -m benchmarks.micro.learnt_sites_rank CONFIG
OUT``.

CONFIG is JSON: how many rounds, of a group with named sites and one that learns them. OUT.RANK gets
the seconds that making each took, those of them that went into measuring round trips, and the sites
that were learnt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

import lossycoll
from benchmarks.common.lab_job import answer
from lossycoll.backend import sharing
from lossycoll.runtime.net.round_trips import round_trips


def main() -> None:
    config = json.loads(sys.argv[1])
    name = os.environ.get("LOSSYCOLL_SITE", "here")
    said: dict[str, Any] = {"named": [], "learnt": [], "measuring": [], "sites": []}

    def timed(places: Mapping[int, tuple[str, int]]) -> dict[int, float]:
        began = time.monotonic()
        found = round_trips(places)
        said["measuring"].append(time.monotonic() - began)
        return found

    sharing.round_trips = timed  # type: ignore[attr-defined,assignment]
    dist.init_process_group("lossy", pg_options={"site": ""})
    for _ in range(config["rounds"]):
        for kind, site in (("named", name), ("learnt", sharing.LEARNT)):
            with lossycoll.reliable():
                dist.barrier()
            began = time.monotonic()
            group = dist.new_group(pg_options={"site": site})
            said[kind].append(time.monotonic() - began)
            if kind == "learnt":
                said["sites"].append(lossycoll.topology(group).sites)
            dist.destroy_process_group(group)
    answer(said)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

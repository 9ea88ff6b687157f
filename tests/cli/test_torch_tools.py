"""A job in torch's own tools: its flight recorder's reader, its debug server and its profiler."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import lossycoll
from lossycoll.cli.main import main
from lossycoll.errors import UnsupportedError
from tests.cli.test_status import LATE, WORLD, Watched, own_folder  # noqa: F401
from tests.support.harness import free_port, init, run_good
from tests.support.waiting import until

HAS_SERVER = all(
    map(importlib.util.find_spec, ("torch.distributed.debug", "jinja2", "tabulate", "requests"))
)


def _read(folder: Path) -> Any:
    """What torch's reader makes of a folder (torch.distributed.flight_recorder.fr_trace)."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    options: Any = JobConfig().parse_args([str(folder)])
    try:
        details, version = read_dir(options)
    finally:
        gc.enable()  # it is switched off there
    return build_db(details, options, version)


def test_torchs_reader_names_the_rank_that_has_not_made_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, LOSSYCOLL_LIVENESS="60")
    with watched.ranks:
        place = watched.waits()["ranks"][0]["control"]
        for number, where in enumerate(([place], [])):
            folder = tmp_path / f"calls{number}"
            assert main(["status", *where, "--flight-recorder", str(folder)]) == 0
            assert f"{WORLD} ranks written" in capsys.readouterr().out
        assert watched.end() == [""] * WORLD
    for number in range(2):
        found = _read(tmp_path / f"calls{number}")
        assert [(group.id[0], group.size) for group in found.groups] == [("0", WORLD)]
        *whole, last = found.collectives
        assert [one.collective_name for one in whole] == ["gloo:all_reduce"] * 5 + ["gloo:barrier"]
        assert all(one.pass_check for one in whole)
        assert last.missing_ranks == {LATE}
        assert (last.collective_name, last.input_sizes) == ("gloo:all_reduce", [[20_000]])
    # Neither a folder without a job, nor one that can't be written.
    assert main(["status", "--flight-recorder", str(tmp_path / "none")]) == 1
    assert "0 jobs" in capsys.readouterr().err


def test_where_torchs_server_cannot_be_loaded_what_it_needs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lossycoll.cli.debug_server", None)
    with pytest.raises(UnsupportedError, match="jinja2, tabulate, and aiohttp or requests"):
        lossycoll.debug_handlers()


def rank_is_profiled(rank: int, world: int) -> tuple[list[tuple[str, int]], list[Any], list[str]]:
    """Calls under the profiler: its events, those of the file, and the debug server's pages."""
    import os

    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    t = torch.ones(20_000)
    dist.all_reduce(t)
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(t)
        future = dist.all_reduce(t, async_op=True).get_future()
        future.wait()
        dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
        dist.barrier()
    file = Path(os.environ["TRACES"], f"{rank}.json")
    lossycoll.export_chrome_trace(profile, file)
    counts = {e.name: 0 for e in profile.events() if e.name.startswith("lossy")}
    for event in profile.events():
        if event.name in counts:
            counts[event.name] += 1
    pages = _pages(rank, t) if HAS_SERVER else []
    dist.destroy_process_group()
    return sorted(counts.items()), json.loads(file.read_text())["traceEvents"], pages


def _pages(rank: int, t: Any) -> list[str]:
    import os

    import torch.distributed as dist
    from torch.distributed.debug import start_debug_server, stop_debug_server

    import lossycoll

    port = int(os.environ["DEBUG_PORT"])
    start_debug_server(port, start_method="spawn", handlers=lossycoll.debug_handlers())
    dist.barrier()
    found = []
    if rank == 0:
        for path in ("lossycoll", "lossycoll_fr_trace"):
            found.append(_get(f"http://127.0.0.1:{port}/{path}"))
    dist.barrier()
    if rank == 0:
        stop_debug_server()
    return found


def _get(url: str) -> str:
    """The page, once the server runs."""
    found: list[str] = []

    def look() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                found.append(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None
        except OSError:
            return False
        return True

    until(look, seconds=60)
    return found[0]


def _named(events: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("name") == name and event["ph"] == "X"]


def test_the_profiler_has_a_span_for_each_call_and_its_phases(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = run_good(rank_is_profiled, 2, {"TRACES": str(tmp_path), "DEBUG_PORT": port})
    for rank, (counts, events, _) in enumerate(ranks):
        message = "lossy:recv" if rank else "lossy:send"
        assert dict(counts) == {
            "lossy:all_reduce": 2,
            message: 1,
            "lossy:barrier": 1,
            "lossy::submit": 4,
        }
        calls = _named(events, "lossy:all_reduce")
        assert [call["args"]["seq"] for call in calls] == [1, 2]
        assert {call["args"]["bytes"] for call in calls} == {80_000}
        assert {call["args"]["group"] for call in calls} == {"0"}
        # What came all at once took no time to receive.
        phases = _named(events, "lossy::wait") + _named(events, "lossy::receive")
        assert phases
        for phase in phases:  # each lies in a call
            begin, end = phase["ts"], phase["ts"] + phase["dur"]
            assert any(
                call["ts"] <= begin and end <= call["ts"] + call["dur"] + 1
                for call in events
                if str(call.get("name", "")).startswith("lossy:") and call["tid"] == phase["tid"]
            )
    if HAS_SERVER:
        status, calls_page = ranks[0][2]
        assert "rank 1" in status
        assert "ended" in status
        assert "all_reduce" in calls_page
        assert "mismatch" not in status

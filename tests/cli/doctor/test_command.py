"""The doctor finds what is there, and what is broken."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lossycoll.cli.answer import Answer, give
from lossycoll.cli.doctor import checks, loopback
from lossycoll.cli.doctor import command as doctor
from lossycoll.cli.doctor.checks import Finding, Severity, admits, torch_versions
from lossycoll.runtime.keys import aead
from lossycoll.runtime.net import descriptor_exchange, interfaces, machine
from lossycoll.runtime.net.interfaces import Interface
from tests.support.command_line import run_lossycoll
from tests.support.harness import warm_python
from tests.support.versions import TORCH

OF_A_JOB = ("LOSSYCOLL_", "MASTER_ADDR", "LOCAL_WORLD_SIZE")


def examine(python: str = "", **changes: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the command in a process of its own, with these variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_JOB)}
    python = python or warm_python()
    done = run_lossycoll("doctor", "--json", python=python, env=environment | changes)
    answer = json.loads(done.stdout)
    assert answer["ok"] is (done.returncode == 0), done.stdout
    return done.returncode, {check["name"]: check for check in answer["checks"]}


def test_healthy() -> None:
    status, checks = examine(sys.executable)
    failed = [check for check in checks.values() if check["status"] == "fail"]
    assert (status, failed) == (0, [])
    for name in ("kernel", "torch", "native engine", "entry point", "clock", "receive buffer"):
        assert checks[name]["found"]
    assert "MTU" in checks["interface lo"]["found"]
    assert "none lost" in checks["UDP over loopback"]["found"]
    assert " 0 packets lost" in checks["engine over loopback"]["found"]
    assert " 0 packets lost" in checks["engine in shared memory"]["found"]
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")


NO_ENGINE = """
import sys
sys.modules["lossycoll._native"] = None
from lossycoll.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def test_an_engine_that_does_not_load_is_a_finding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_ENGINE],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["native engine"]["status"] == "fail"
    assert "does not load" in found["native engine"]["found"]
    assert "C compiler" in found["native engine"]["advice"]


def test_entry_point_that_torch_does_not_load() -> None:
    status, checks = examine(sys.executable, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if TORCH >= (2, 14):  # which looks in the group torch.distributed.backends besides
        assert (status, checks["entry point"]["status"]) == (0, "ok")
        return
    assert status == 1
    assert checks["entry point"]["status"] == "fail"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in checks["entry point"]["advice"]


@pytest.mark.parametrize(
    ("name", "value", "advised"),
    [
        ("LOSSYCOLL_INJCT", "loss=0.1", "LOSSYCOLL_INJECT"),
        ("LOSSYCOLL_REPAIR", "many", "LOSSYCOLL_REPAIR"),
        ("LOSSYCOLL_PORT_RANGE", "9-1", "LOSSYCOLL_PORT_RANGE"),
        ("LOSSYCOLL_MTU", "100", "LOSSYCOLL_MTU"),
    ],
)
def test_a_slip_or_a_bad_value_breaks_a_job(
    name: str, value: str, advised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (found,) = checks.options()
    assert found.status is Severity.FAIL
    assert name in found.found
    assert advised in found.advice


@pytest.mark.parametrize(
    "changes", [{"LOSSYCOLL_INTERFACE": "nope"}, {"MASTER_ADDR": "nowhere.invalid"}]
)
def test_interface_that_a_job_would_not_get(changes: dict[str, str]) -> None:
    status, checks = examine(**changes)
    assert status == 1
    assert checks["interface in use"]["status"] == "fail"
    assert "lo (127.0.0.1)" in checks["interface in use"]["advice"]  # what there is instead


def test_interface_is_the_one_that_a_job_gets() -> None:
    status, checks = examine(MASTER_ADDR="127.0.0.1")
    assert status == 0
    assert checks["interface in use"]["found"] == "lo (127.0.0.1), routes to 127.0.0.1"


def test_packets_larger_than_an_interface_of_1500_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Interface("eth0", "192.0.2.7", 1500)
    monkeypatch.setattr(interfaces, "choose", lambda wanted, master: wire)
    found = []
    for size in ("0", "1500", "1501"):
        monkeypatch.setenv("LOSSYCOLL_MTU", size)
        sizes = [one for one in checks.network() if one.name == "MTU in use"]
        found.append([(one.status, "1500" in one.advice) for one in sizes])
    assert found == [[], [(Severity.OK, False)], [(Severity.WARN, True)]]


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_port_range_that_is_taken_breaks_a_job(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        changes = {"LOSSYCOLL_INTERFACE": "lo", "LOSSYCOLL_PORT_RANGE": f"{port}-{port}"}
        status, checks = examine(**changes)
    assert status == 1
    assert checks["port range"]["status"] == "fail"
    assert "LOSSYCOLL_PORT_RANGE" in checks["port range"]["advice"]


def test_port_range_has_to_hold_the_ranks_of_this_machine() -> None:
    changes = {"LOSSYCOLL_INTERFACE": "lo", "LOSSYCOLL_PORT_RANGE": "23450-23470"}
    status, checks = examine(**changes, LOCAL_WORLD_SIZE="2")
    assert (status, checks["port range"]["status"]) == (0, "ok")
    assert "21 UDP, 21 TCP free, for 2 ranks on this machine" in checks["port range"]["found"]
    status, checks = examine(**changes, LOCAL_WORLD_SIZE="22")
    assert (status, checks["port range"]["status"]) == (1, "fail")
    assert "for 22 ranks on this machine" in checks["port range"]["found"]


@pytest.mark.parametrize(
    ("text", "version", "good"),
    [
        (">=2.13,<2.16", "2.13.0+cpu", True),
        ("<2.16,>=2.13", "2.15.3+cu130", True),
        (">=2.13, <2.16", "2.12.1", False),
        (">=2.13,<2.16", "2.16.0", False),
        (">=2.13,<2.16", "2.16.0a0+git1234", False),
        (">=3.10", "3.9.18", False),
        (">=3.10", "3.10.0", True),
        ("", "1", True),
        (">=2.13", "2.13.0rc1", False),
        (">=2.13", "2.13.0a0+git1234", False),
        (">=2.13", "2.13.0.dev20260101+cpu", False),
        (">=2.13", "2.13.1rc1", True),
        (">=2.13", "2.13.0.post1", True),
    ],
)
def test_versions_are_those_that_the_package_admits(text: str, version: str, good: bool) -> None:
    assert admits(text, version) is good


def test_a_range_of_versions_that_cannot_be_read_is_an_error() -> None:
    for text, version in (("~=2.13", "2.13"), (">=2.13.*", "2.13"), (">=2.13", "unknown")):
        with pytest.raises(ValueError, match="version"):
            admits(text, version)


def test_a_version_that_cannot_be_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "unknown")
    found = {one.name: one for one in checks.versions()}
    assert found["torch"].status is Severity.WARN
    assert "Invalid version: 'unknown'" in found["torch"].advice
    assert found["Python"].status is Severity.OK


def test_every_torch_that_the_package_admits_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in {
        "2.12.1+cpu": Severity.FAIL,
        "2.13.0+cpu": Severity.OK,
        "2.14.1+cu130": Severity.OK,
        "2.99.0": Severity.FAIL,
    }.items():
        monkeypatch.setattr("torch.__version__", version)
        found = {one.name: one for one in checks.versions()}
        assert (found["torch"].found, found["torch"].status) == (version, status)
        assert found["Python"].status is Severity.OK
        if status is Severity.FAIL:
            assert found["torch"].advice == f'pip install "torch{torch_versions()}"'


def test_injection_is_a_warning_and_leaves_the_self_test_alone() -> None:
    status, checks = examine(LOSSYCOLL_INJECT="loss=0.5,seed=1")
    assert status == 0
    assert checks["variables"]["status"] == "warn"
    assert " 0 packets lost" in checks["engine over loopback"]["found"]


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls_ill() -> list[Finding]:
        raise LookupError("no such bone")

    monkeypatch.setattr(doctor, "CHECKS", (falls_ill,))
    (finding,) = doctor.examine()
    assert finding == Finding("falls ill", "LookupError: no such bone", Severity.FAIL)


def test_advice_is_printed_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "sysctl -w net.core.rmem_max=4194304 " * 5
    found = "no [link] at all"  # which isn't markup
    shown = doctor.shown([Finding("receive buffer", found, Severity.WARN, advice)])
    monkeypatch.setenv("COLUMNS", "60")
    give(Answer({}, shown), argparse.Namespace(json=False))
    said = capsys.readouterr().out
    assert advice in said
    assert found in said


def test_memory_can_be_shared_where_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = checks.memory_sharing()
    assert (found.status, found.found[:4]) == (Severity.OK, "yes,"), found
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(machine, "memory_room", lambda: float(32 << 20))
    (found,) = checks.memory_sharing()
    assert found.status is Severity.WARN
    assert "0.0 GiB of memory free" in found.found
    assert "4 ranks may take 52 MiB of shared memory" in found.advice


def test_a_machine_on_which_memory_cant_be_handed_over_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptor_exchange, "peer_user", lambda end: -1)
    (found,) = checks.memory_sharing()
    assert found.status is Severity.WARN
    assert "another user listens there" in found.found
    assert "UDP" in found.advice

    def refused(most: int) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(descriptor_exchange, "DescriptorExchange", refused)
    (found,) = checks.memory_sharing()
    assert "Address family not supported" in found.found


def test_a_bad_variable_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSYCOLL_REPIAR", "1")
    found = [*checks.options(), *loopback.sealing()]
    assert [one.name for one in found] == ["variables"]
    assert "did you mean LOSSYCOLL_REPAIR?" in found[0].advice


@pytest.mark.in_clear
def test_what_seals_is_shown_with_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "SLOW_GB_S", 1e6)
    assert next(loopback.sealing()).status is Severity.WARN
    monkeypatch.setattr(loopback, "SLOW_GB_S", 0.0)
    (found,) = loopback.sealing()
    assert found.status is Severity.OK, found
    for word in ("SSL", "aes-128-gcm", "aes-256-gcm", "chacha20-poly1305", "GB/s"):
        assert word in found.found
    assert found.found.endswith("no secret is set")
    monkeypatch.setenv("LOSSYCOLL_SECRET", "a secret of tests")
    (found,) = loopback.sealing()
    assert found.found.endswith("a secret is set: encrypt by aes-128-gcm")
    monkeypatch.setenv("LOSSYCOLL_SECRET", "short")
    (found,) = loopback.sealing()
    assert found.status is Severity.FAIL
    assert "has 5 bytes" in found.advice


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSSYCOLL_SECRET", "the secret of this job")
    monkeypatch.setenv("LOSSYCOLL_MTU", "1400")
    (found,) = checks.options()
    assert found.found == "LOSSYCOLL_MTU=1400 LOSSYCOLL_SECRET (set)"
    monkeypatch.setenv("LOSSYCOLL_SECERT", "the secret of another job")
    (found,) = checks.options()
    assert found.status is Severity.FAIL
    assert "did you mean LOSSYCOLL_SECRET?" in found.advice
    assert "the secret" not in f"{found}"


@pytest.mark.in_clear
@pytest.mark.parametrize(("secret", "status"), [("", Severity.WARN), ("x" * 16, Severity.FAIL)])
def test_a_machine_that_cant_seal_says_so(
    secret: str, status: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aead, "library", lambda path: ("", "there is no libcrypto"))
    if secret:
        monkeypatch.setenv("LOSSYCOLL_SECRET", secret)
    (found,) = loopback.sealing()
    assert found.status is status
    assert "there is no libcrypto" in found.found
    assert "libssl3" in found.advice


def test_interfaces_are_found_where_sys_is_that_of_another_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or isn't mounted, as in some containers."""
    monkeypatch.setattr(checks, "SYSTEM_NET", tmp_path / "nowhere")
    found = {one.name: one for one in checks.interfaces()}
    assert found["interface lo"].status is Severity.OK
    assert re.fullmatch(r"MTU \d+", found["interface lo"].found)

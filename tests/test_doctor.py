"""The doctor finds what is there, and what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from lossycoll import doctor
from lossycoll.doctor_checks import Finding, Status


def examine(**changes: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the command in a process of its own, with these variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    done = subprocess.run(
        [sys.executable, "-m", "lossycoll.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment | changes,
    )
    answer = json.loads(done.stdout)
    assert answer["ok"] is (done.returncode == 0), done.stdout
    return done.returncode, {check["name"]: check for check in answer["checks"]}


def test_healthy() -> None:
    status, checks = examine()
    failed = [check for check in checks.values() if check["status"] == "fail"]
    assert (status, failed) == (0, [])
    for name in ("kernel", "torch", "native engine", "entry point", "clock", "receive buffer"):
        assert checks[name]["found"]
    assert "MTU" in checks["interface lo"]["found"]
    assert "none lost" in checks["UDP over loopback"]["found"]
    assert " 0 packets lost" in checks["engine over loopback"]["found"]
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")


def test_entry_point_that_torch_does_not_load() -> None:
    status, checks = examine(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert status == 1
    assert checks["entry point"]["status"] == "fail"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in checks["entry point"]["advice"]


def test_misspelt_variable_breaks_a_job() -> None:
    status, checks = examine(LOSSYCOLL_INJCT="loss=0.1")
    assert status == 1
    assert checks["variables"]["status"] == "fail"
    assert "LOSSYCOLL_INJECT" in checks["variables"]["advice"]


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
    assert finding == Finding("falls ill", Status.FAIL, "LookupError: no such bone")


def test_advice_is_printed_whole() -> None:
    advice = "sysctl -w net.core.rmem_max=4194304 " * 5
    console = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    doctor.show([Finding("receive buffer", Status.WARN, "small", advice)], console)
    assert advice in console.export_text()

"""Check what this machine, or the network to another one, can do, and say what to change.

Exit code 1 means that something would break a job; a warning only costs speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Final

from rich.table import Column, Table
from rich.text import Text

from lossycoll.cli.answer import EXIT_FAILED, Answer, add_json, give

from . import checks, loopback
from .checks import Finding, Severity
from .peer import command as peer

CHECKS: Final[tuple[Callable[[], Iterable[Finding]], ...]] = (
    checks.system,
    checks.versions,
    checks.engine,
    checks.entry_point,
    checks.options,
    checks.clock,
    checks.socket_buffers,
    checks.offloads,
    checks.interfaces,
    checks.rdma,
    checks.network,
    checks.host_name,
    checks.memory_sharing,
    loopback.sealing,
    loopback.loopback,
)
MARKS = {
    Severity.OK: Text("ok", "green"),
    Severity.WARN: Text("warn", "yellow"),
    Severity.FAIL: Text("FAIL", "red"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    peer.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    settings: dict[str, str] | None = None
    if options.peer is None:
        findings = examine()
    else:
        findings, settings = peer.run(options)
    broken = any(finding.status is Severity.FAIL for finding in findings)
    data = {"ok": not broken, "checks": [asdict(finding) for finding in findings]}
    said = shown(findings)
    if settings is not None:
        data["options"] = settings
        said += [Text(f"  export {name}={value}") for name, value in settings.items()]
    return give(Answer(data, said, status=EXIT_FAILED if broken else 0), options)


def examine() -> list[Finding]:
    """Runs every check. One that raises is itself a finding: a doctor must not fall ill."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, f"{type(error).__name__}: {error}", Severity.FAIL))
    return findings


def shown(findings: list[Finding]) -> list[Any]:
    """A table, and what to change."""
    columns = ("", Column("check", no_wrap=True), Column("found", overflow="fold"))
    table = Table(*columns, box=None, pad_edge=False)
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.name, finding.found)
    advised = [
        Text.assemble("  ", MARKS[one.status], f" {one.name}: ", one.advice)
        for one in findings
        if one.advice
    ]
    return [table, *(["\nWhat to change:"] if advised else []), *advised]

"""Check what this machine, or the network to another one, can do, and say what to change.

Exit code 1 means that something would break a job; a warning only costs speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

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
    Severity.OK: "[green]ok[/]",
    Severity.WARN: "[yellow]warn[/]",
    Severity.FAIL: "[red]FAIL[/]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    peer.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    settings: dict[str, str] = {}
    if options.peer is None:
        findings = examine()
    else:
        findings, settings = peer.run(options)
    broken = any(finding.status is Severity.FAIL for finding in findings)
    if options.json:
        answer = {"ok": not broken, "checks": [asdict(finding) for finding in findings]}
        print(json.dumps(answer | ({} if options.peer is None else {"options": settings})))
    else:
        show(findings, Console())
        for name, value in settings.items():
            print(f"  export {name}={value}")
    return 1 if broken else 0


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


def show(findings: list[Finding], console: Console) -> None:
    columns = ("", Column("check", no_wrap=True), Column("found", overflow="fold"))
    table = Table(*columns, box=None, pad_edge=False)
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.name, escape(finding.found))
    console.print(table, highlight=False)
    advised = [finding for finding in findings if finding.advice]
    if advised:
        console.print("\nWhat to change:")
    for finding in advised:
        # Not wrapped: these lines are there to be copied.
        line = f"  {MARKS[finding.status]} {finding.name}: "
        console.print(line, end="", highlight=False, soft_wrap=True)
        console.print(finding.advice, markup=False, highlight=False, soft_wrap=True)

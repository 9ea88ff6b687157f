"""Findings of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    OK = "ok"
    WARN = "warn"
    """Slower or less certain than it could be."""
    FAIL = "fail"
    """A job would not work."""


@dataclass(frozen=True)
class Finding:
    name: str
    status: Severity
    found: str
    advice: str = ""


def good_if(good: bool, name: str, found: str, otherwise: Severity, advice: str) -> Finding:
    return Finding(name, Severity.OK, found) if good else Finding(name, otherwise, found, advice)

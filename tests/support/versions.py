"""Versions that tests go by where torch's own behaviour has changed."""

from __future__ import annotations

from importlib import metadata
from typing import Final

TORCH: Final = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
"""(major, minor)."""

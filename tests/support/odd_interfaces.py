"""Interfaces that are down, or whose names aren't ASCII or no text at all, and other spellings of
addresses. A program: to be run in a network namespace of its own (tests/runtime/net)."""

from __future__ import annotations

import os
import subprocess

import pytest

from lossycoll.errors import InterfaceError
from lossycoll.runtime.net.interfaces import choose, interfaces, mtu_of, why_cut_off

GONE = "10.98.0.1"
NAMES = os.fsdecode(b"caf\xc3\xa9"), os.fsdecode(b"odd\xff")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    ip("address", "add", f"{GONE}/32", "dev", "lo")
    assert interfaces() == [], "lo is down"
    for wanted in ("lo", GONE):
        with pytest.raises(InterfaceError, match="which is neither an interface that is up nor"):
            choose(wanted, None)
    ip("link", "set", "lo", "up")
    assert choose(GONE, None).name == "lo"
    ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
    for number, name in enumerate(NAMES, 1):
        ip("link", "set", name, "up")
        ip("address", "add", f"10.98.1.{number}/32", "dev", name)
        ip("address", "add", f"fd98::{number}/128", "dev", name, "nodad")
    found = {(one.name, one.address) for one in interfaces()}
    for number, name in enumerate(NAMES, 1):
        assert {(name, f"10.98.1.{number}"), (name, f"fd98::{number}")} < found
        assert choose(name, None).mtu == mtu_of(name) > 1000
        own = f"10.98.1.{number}"
        assert not why_cut_off(name, own, own)
    assert choose("FD98:0:0::0001", None).name == NAMES[0]
    ip("link", "set", NAMES[0], "down")
    assert NAMES[0] not in {one.name for one in interfaces()}


if __name__ == "__main__":
    main()

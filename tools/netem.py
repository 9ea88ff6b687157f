#!/usr/bin/env python3
"""Loss and delay on a real host's interface, with the kernel's tc netem.

    python -m tools.netem apply eth1 --loss 0.01 --burst 4 --delay-ms 10     says what it would do
    python -m tools.netem apply eth1 --loss 0.01 --burst 4 --delay-ms 10 --yes     and does it
    python -m tools.netem show eth1
    python -m tools.netem clear eth1 --yes

It acts on what the interface sends: for a link that is bad both ways, run it on both hosts. Without
--yes nothing is touched. A tbf queue stands in front of netem: it cuts aggregates into packets, or
loss would hit 64 KiB at once. ``clear`` takes away only what ``apply`` has put there.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lossycoll.cli.lab import add_numbers, numbers
from lossycoll.errors import LabError, LabPermissionError, LossyError
from lossycoll.lab import Link
from lossycoll.lab.netem import link_arguments
from lossycoll.lab.network import ETHERNET_BYTES

HANDLE: Final = "1055:"
"""Of the queue that ``apply`` puts at the root, by which ``clear`` knows it."""
CHILD: Final = "1056:"
FIELDS: Final = {
    "loss": "share of packets lost, as in 0.01 or 1%%",
    "burst": "mean number of packets lost in a row",
    "delay_ms": "added to what is sent",
    "jitter_ms": "by which the delay differs to both sides; it reorders",
    "reorder": "share of packets sent ahead of the delayed ones",
    "duplicate": "share of packets sent twice",
    "rate_mbit": "at most",
}

Run = Callable[[Sequence[str]], str]


def run(command: Sequence[str]) -> str:
    """Runs a command and returns its output; LabError, with what it said, when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise LabError(f"{command[0]} isn't installed; it comes with iproute2") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
        if "Operation not permitted" in said:
            raise LabPermissionError(f"{shlex.join(command)}: {said}; it takes root, as with sudo")
        hint = ""
        if "qdisc kind is unknown" in said:
            hint = "; this kernel lacks it: modprobe sch_netem sch_tbf, or another kernel"
        raise LabError(f"{shlex.join(command)}: {said}{hint}")
    return done.stdout


def device(name: str, run: Run = run) -> Mapping[str, Any]:
    """What ip knows of an interface; LabError, naming those there are, if it isn't one."""
    found = {one["ifname"]: one for one in json.loads(run(["ip", "-json", "addr", "show"]))}
    if name not in found:
        raise LabError(f"there is no interface {name}; there are {', '.join(found)}")
    found_one: Mapping[str, Any] = found[name]
    return found_one


def login(environ: Mapping[str, str], run: Run = run) -> dict[str, str]:
    """The interfaces that this login may hang on, each with the reason."""
    out = {}
    for route in json.loads(run(["ip", "-json", "route", "show", "default"]) or "[]"):
        if "dev" in route:
            out[route["dev"]] = "the default route goes through it"
    client = environ.get("SSH_CONNECTION", "").split(" ")[0].partition("%")[0]
    try:
        address = str(ipaddress.ip_address(client))
    except ValueError:
        return out
    for route in json.loads(run(["ip", "-json", "route", "get", address])):
        out[route["dev"]] = f"you are logged in through it, from {address}"
    return out


def root_queue(name: str, run: Run = run) -> Mapping[str, Any] | None:
    """The queue at an interface's root; None if it is the kernel's own."""
    for queue in json.loads(run(["tc", "-json", "qdisc", "show", "dev", name])):
        # What the kernel has put there by itself has no handle.
        if queue.get("root") and queue["handle"] != "0:":
            found: Mapping[str, Any] = queue
            return found
    return None


def apply_commands(name: str, link: Link, mtu: int, again: bool) -> list[list[str]]:
    """The commands that make ``link`` of what an interface sends. ``again``: over our own."""
    # tbf cuts what is longer than its burst.
    burst = 2 * (mtu + ETHERNET_BYTES)
    lines = [
        *([f"tc qdisc del dev {name} root"] if again else []),
        f"tc qdisc add dev {name} root handle {HANDLE} tbf rate 100gbit burst {burst} limit 1gb",
        f"tc qdisc add dev {name} parent {HANDLE}1 handle {CHILD} netem",
    ]
    commands = [line.split() for line in lines]
    commands[-1] += link_arguments(link, mtu)
    return commands


def apply(name: str, link: Link, act: bool, run: Run = run) -> None:
    mtu = device(name, run)["mtu"]
    before = root_queue(name, run)
    if before is not None and before["handle"] != HANDLE:
        raise LabError(
            f"{name} already has a queue of somebody else's: {before['kind']} {before['handle']}; "
            f"take it away with 'tc qdisc del dev {name} root' if you don't need it"
        )
    commands = apply_commands(name, link, mtu, before is not None)
    if not tell(name, commands, act, run):
        return
    try:
        for command in commands:
            run(command)
    except LabError:
        left = root_queue(name, run)
        if left is not None and left["handle"] == HANDLE:
            run(["tc", "qdisc", "del", "dev", name, "root"])
        raise
    print(f"done; python -m tools.netem clear {name} --yes takes it away")


def clear(name: str, act: bool, run: Run = run) -> None:
    device(name, run)
    before = root_queue(name, run)
    if before is None or before["handle"] != HANDLE:
        print(f"{name} has nothing of ours")
        return
    command = ["tc", "qdisc", "del", "dev", name, "root"]
    if tell(name, [command], act, run):
        run(command)


def show(name: str, run: Run = run) -> None:
    device(name, run)
    print(run(["tc", "-s", "qdisc", "show", "dev", name]), end="")


def tell(name: str, commands: Sequence[Sequence[str]], act: bool, run: Run) -> bool:
    """Prints what is done, or would be; returns whether it may be."""
    for command in commands:
        print(shlex.join(command))
    reason = login(os.environ, run).get(name)
    if act:
        return True
    if reason:
        print(f"careful: {name} may be your way in: {reason}", file=sys.stderr)
    print("nothing was done; --yes does it", file=sys.stderr)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.netem", description="Loss and delay on a real host's interface."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("apply", "clear", "show"):
        one = actions.add_parser(action)
        one.add_argument("interface")
        if action == "apply":
            add_numbers(one, FIELDS)
        if action != "show":
            one.add_argument("--yes", action="store_true", help="do it; without, only say what")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.action == "apply":
            link = Link(**numbers(chosen, FIELDS))
            if link == Link():
                parser.error("nothing to apply; say --loss, --delay-ms or another")
            apply(chosen.interface, link, chosen.yes)
        elif chosen.action == "clear":
            clear(chosen.interface, chosen.yes)
        else:
            show(chosen.interface)
    except LossyError as error:
        print(f"netem: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

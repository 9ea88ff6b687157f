"""Peers behind translators average: real engines, each in a network of its own, whose packets a
translator of the test carries (tests/support/nat_world.py)."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.nat_world import SCENARIOS
from tests.support.new_network import NEW_NETWORK, run_in_a_new_network

SECRET = "a secret of tests"
SHORT = {"cones", "symmetric"}
"""Those of the short suite, where they are run without a secret too in the long one."""
CASES = [
    pytest.param(
        name,
        secret,
        id=f"{name}-{'sealed' if secret else 'clear'}",
        marks=() if name in SHORT and secret else pytest.mark.long,
    )
    for name in SCENARIOS
    for secret in ((SECRET, "") if name in SHORT else (SECRET,))
]


@pytest.mark.parametrize(("scenario", "secret"), CASES)
def test_behind_translators(scenario: str, secret: str) -> None:
    makes = "ip tuntap add t0 mode tun"
    done = subprocess.run([*NEW_NETWORK, "sh", "-c", makes], capture_output=True, check=False)
    if done.returncode or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("this system gives no network namespace with a device of its own (TUN)")
    run_in_a_new_network("tests.support.nat_world", scenario, secret, timeout=110)

"""Hosts on a bridge, for networks that the kernel makes: veth devices, and ip, nft and tc.

Where there are several sites, each has a bridge, and a cable to one more bridge that joins them.

Senders have their offloads switched off: the kernel then cuts aggregates before the packets reach
the bridge, so that loss hits packets and not 64 KiB at once. It wouldn't if loss were made where
they are sent: queues and filters there still see aggregates.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Final

from ..errors import LabError
from .counters import Counters
from .network import Network, address_of
from .switch import Switch

DEVICE: Final = "eth0"
BRIDGE: Final = "br"
"""And the number of the site."""
WAN: Final = "wan"
"""The bridge that joins those of the sites."""
TOOL_SECONDS: Final = 30.0


class Bridge(Switch):
    """A switch's namespaces, with a bridge in the middle and a veth device per host in its place;
    what passes is up to others. Raises LabError, with what the failing command said, and
    LabPermissionError."""

    def __init__(self, network: Network, environment: dict[str, str]) -> None:
        super().__init__(network, environment, devices=False)
        self._environment = environment
        try:
            self._build()
            self.prepare()
            self.apply(network)
        except BaseException:
            self.close()
            raise

    def prepare(self) -> None:
        """Makes what stays as it is until the end."""

    def apply(self, network: Network) -> None:
        """Puts links and ports in force; called at the start and for each change."""
        raise NotImplementedError

    def counters(self) -> Counters:
        raise NotImplementedError

    def change(self, network: Network) -> None:
        if why := self.refusal(network):
            raise LabError(why)
        self.apply(network)
        self.network = network

    @property
    def middle(self) -> int:
        """The number of the namespace that has the bridge."""
        return self.network.total_hosts

    @property
    def middle_path(self) -> str:
        return f"/proc/{self.pid}/fd/{self._shared.net_fd[self.middle]}"

    def tool(self, number: int, *command: str, text: str | None = None) -> str:
        """Runs a command in a namespace; returns its output. LabError when it fails."""
        done = subprocess.run(
            self.inside(number, list(command)),
            input=text,
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=TOOL_SECONDS,
            check=False,
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
            what = " ".join(command[:4])
            if text and (at := re.search(r"^Command failed -:(\d+)$", done.stderr, re.MULTILINE)):
                what = f"{command[0]} {text.splitlines()[int(at[1]) - 1]}"
            raise LabError(f"{what} failed in the laboratory: {said}")
        return done.stdout

    def batch(self, number: int, program: str, lines: Sequence[str]) -> None:
        self.tool(number, program, "-batch", "-", text="\n".join(lines) + "\n")

    def _build(self) -> None:
        hosts, mtu = self.network.total_hosts, self.network.mtu
        bridges, cables = _bridges(self.network)
        self.batch(self.middle, "ip", bridges)
        for host in range(hosts):
            self.batch(host, "ip", _device(host, self.network, self.middle_path))
            offloads = ("tso", "off", "gso", "off", "tx-udp-segmentation", "off")
            self.tool(host, "ethtool", "-K", DEVICE, *offloads)
        at = self.network.site_of
        ports = {port_of(host): f"{BRIDGE}{at(host)}" for host in range(hosts)} | cables
        joined = [f"link set {port} mtu {mtu} master {to} up" for port, to in ports.items()]
        self.batch(self.middle, "ip", joined)
        if self.network.sites > 1:
            self.batch(self.middle, "bridge", _ways(self.network))
        self._await_up(self.middle, set(ports))
        for host in range(hosts):
            self._await_up(host, {DEVICE})

    def _await_up(self, number: int, devices: set[str]) -> None:
        """The kernel takes up to a second to notice a carrier; what is sent before it drops."""
        end = time.monotonic() + TOOL_SECONDS
        while True:
            shown = json.loads(self.tool(number, "ip", "-json", "link"))
            state = {one["ifname"]: one["operstate"] for one in shown}
            down = sorted(name for name in devices if state.get(name) != "UP")
            if not down:
                return
            if time.monotonic() > end:
                raise LabError(f"{', '.join(down)} of the laboratory never came up: {state}")
            time.sleep(0.02)


def port_of(host: int) -> str:
    """The bridge's end of a host's cable."""
    return f"h{host}"


def gateway_of(site: int) -> tuple[str, str]:
    """A site's cable to the others: its end at the site's bridge, through which packets leave, and
    the other, through which they come."""
    return f"s{site}", f"w{site}"


def _bridges(network: Network) -> tuple[list[str], dict[str, str]]:
    """Commands for the bridges and the cables between them; the bridge of each end of a cable."""
    names = [f"{BRIDGE}{site}" for site in range(network.sites)]
    lines: list[str] = []
    cables: dict[str, str] = {}
    if network.sites > 1:
        for site, name in enumerate(names):
            end, other = gateway_of(site)
            lines.append(f"link add {end} type veth peer name {other}")
            cables |= {end: name, other: WAN}
        names.append(WAN)
    for name in names:
        lines += [
            f"link add {name} type bridge stp_state 0 mcast_snooping 0",
            f"link set {name} mtu {network.mtu} up",
        ]
    return lines, cables


def _ways(network: Network) -> list[str]:
    """Tells each bridge where each host is. It would learn that from what a host sends; until then
    what is for that host goes to all, through the gateways of all."""
    out = []
    for host in range(network.total_hosts):
        own = network.site_of(host)
        far = [gateway_of(site)[0] for site in range(network.sites) if site != own]
        ports = [port_of(host), gateway_of(own)[1], *far]
        out += [f"fdb add {_hardware(host)} dev {port} master static" for port in ports]
    return out


def _device(host: int, network: Network, middle: str) -> list[str]:
    out = [
        f"link add {DEVICE} mtu {network.mtu} address {_hardware(host)} type veth "
        f"peer name {port_of(host)} mtu {network.mtu}",
        f"link set {port_of(host)} netns {middle}",
        f"addr add {address_of(host)}/24 dev {DEVICE}",
        f"link set {DEVICE} up",
    ]
    return out + [
        f"neigh add {address_of(other)} lladdr {_hardware(other)} dev {DEVICE} nud permanent"
        for other in network.others(host)
    ]


def _hardware(host: int) -> str:
    return f"02:6c:61:62:00:{host + 1:02x}"

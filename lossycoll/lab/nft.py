"""Loss alone, by the kernel's packet filter where packets arrive: at the kernel's full speed."""

from __future__ import annotations

import json
import math
import random
from typing import Final, NamedTuple

from .bridge import DEVICE, Bridge
from .counters import Counters, HostCounts, LinkCounts, QueueCounts, crossing
from .network import ETHERNET_BYTES, Link, Network, address_of

RUNS: Final = 2000
"""Runs of lost packets before the sequence repeats."""


class Pattern(NamedTuple):
    """``runs``: (first, last) packets lost in a row, ascending, of every ``period`` packets."""

    period: int
    runs: tuple[tuple[int, int], ...]


def draw(link: Link, seed: int, pair: tuple[int, int]) -> Pattern:
    """The sequence of a link: runs and gaps of a two-state chain, with the link's share of loss.

    Runs are geometric, and so are the gaps, scaled so that the share is the one that was asked for.
    """
    if link.loss <= 0:
        return Pattern(1, ())
    if link.loss >= 1:
        return Pattern(1, ((0, 0),))
    begin, go_on = link.chances
    rng = random.Random(f"{seed} {pair[0]} {pair[1]}")
    runs = [_geometric(rng, 1 - go_on) for _ in range(RUNS)]
    gaps = [_geometric(rng, begin) for _ in range(RUNS)]
    period = min(round(sum(runs) / link.loss), 1 << 31)
    # One packet at least between two runs, or they would be one.
    scale = max(0.0, (period - sum(runs) - RUNS) / max(1, sum(gaps) - RUNS))
    at, ideal, out = 0, 0.0, []
    for run, gap in zip(runs, gaps, strict=True):
        ideal += 1 + (gap - 1) * scale
        first = at + max(1, round(ideal))
        ideal -= first - at
        out.append((first, first + run - 1))
        at = first + run
    return Pattern(max(period, at), tuple(out))


def _geometric(rng: random.Random, chance: float) -> int:
    """Number of draws until one succeeds; 1 at least."""
    count = 1
    if chance < 1:
        # The inverse of the distribution, as one draw for each would take 1 / chance of them.
        count += int(rng.expovariate(1.0) / -math.log1p(-chance))
    return count


TABLE: Final = "netdev lab"
KINDS: Final = ("offered", "lost", "bursts")


class Nft(Bridge):
    """A chain per sender at every receiver. The same seed loses the same packets."""

    meaning = "the kernel's packet filter: loss alone, at full speed"
    commands = ("ip", "nft", "ethtool")

    @staticmethod
    def refusal(network: Network) -> str:
        if network.only_loses:
            return ""
        return (
            "the backend nft makes loss alone; delay, jitter, order, doubles and rates take the "
            "backend switch"
        )

    def prepare(self) -> None:
        for host in range(self.network.total_hosts):
            self.tool(host, "nft", "-f", "-", text=_table(self.network, host))

    def apply(self, network: Network) -> None:
        for host in range(network.total_hosts):
            rules = [
                line for sender in network.others(host) for line in _rules(network, sender, host)
            ]
            self.tool(host, "nft", "-f", "-", text="\n".join(rules) + "\n")

    def counters(self) -> Counters:
        links, sent = {}, {}
        for host in range(self.network.total_hosts):
            said = self.tool(host, "nft", "-j", "list", "counters", "table", *TABLE.split())
            entries = [e["counter"] for e in json.loads(said)["nftables"] if "counter" in e]
            packets = {entry["name"]: entry["packets"] for entry in entries}
            # A filter is given packets without their Ethernet headers.
            size = {e["name"]: e["bytes"] + ETHERNET_BYTES * e["packets"] for e in entries}
            for sender in self.network.others(host):
                offered, lost, bursts = (packets[f"{kind}{sender}"] for kind in KINDS)
                sent[sender, host] = QueueCounts(offered, size[f"offered{sender}"])
                arrived = size[f"offered{sender}"] - size[f"lost{sender}"]
                links[sender, host] = LinkCounts(offered, lost, offered - lost, arrived, bursts)
        every = range(self.network.total_hosts)
        hosts = [HostCounts(port.up, port.down) for port in crossing(sent, every)]
        sites = crossing(sent, [self.network.site_of(host) for host in every])
        return Counters(dict(sorted(links.items())), tuple(hosts), tuple(sites))


def _table(network: Network, host: int) -> str:
    senders = network.others(host)
    lines = [f"table {TABLE} {{"]
    lines += [f"counter {kind}{sender} {{ }}" for kind in KINDS for sender in senders]
    for sender in senders:
        lost = f"counter name lost{sender} drop"
        lines += [f"chain first{sender} {{ counter name bursts{sender} {lost}\n}}"]
        lines += [f"chain next{sender} {{ {lost}\n}}", f"chain from{sender} {{ }}"]
    lines += [f'chain in {{ type filter hook ingress device "{DEVICE}" priority 0; policy accept;']
    lines += [f"ip saddr {address_of(sender)} jump from{sender}" for sender in senders]
    return "\n".join([*lines, "}", "}", ""])


def _rules(network: Network, sender: int, host: int) -> list[str]:
    """Packets of a sender are numbered, and dropped by their number."""
    pattern = draw(network.link_of(sender, host), network.seed, (sender, host))
    chain = f"{TABLE} from{sender}"
    fates = []
    for first, last in pattern.runs:
        fates.append(f"{first} : goto first{sender}")
        if last > first:
            rest = f"{first + 1}-{last}" if last > first + 1 else f"{last}"
            fates.append(f"{rest} : goto next{sender}")
    out = [f"flush chain {chain}", f"add rule {chain} counter name offered{sender}"]
    if pattern.period == 1 and fates:
        out.append(f"add rule {chain} goto next{sender}")
    elif fates:
        number = f"numgen inc mod {pattern.period}"
        out.append(f"add rule {chain} {number} vmap {{ {', '.join(fates)} }}")
    return out

"""A laboratory of bad networks: hosts in network namespaces, joined by links that lose packets.

``with Lab(Network(hosts=2, link=Link(loss=0.01, delay_ms=10))) as lab: lab.run([...])``.
docs/lab.md says what it does, and how well. Neither torch nor numpy is needed here.
"""

from __future__ import annotations

from .laboratory import Lab
from .network import Link, Network, Port
from .profiles import PROFILES

__all__ = ["PROFILES", "Lab", "Link", "Network", "Port"]

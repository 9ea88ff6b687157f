"""Payload of a packet of a given size."""

from __future__ import annotations

from typing import Final

HEADER_BYTES: Final = 48
"""lc_header_bytes()"""
TAG_BYTES: Final = 16
"""LC_TAG_BYTES"""
IP_UDP_BYTES: Final = {4: 28, 6: 48}
AUTO_MTU_MAX: Final = 9000
SHARED_PAYLOAD: Final = 65024
"""LC_SHARED_PAYLOAD: data bytes per packet within a machine that shares memory."""


def payload_bytes(mtu: int, ip_version: int) -> int:
    """Data bytes per packet for an MTU, sealed or not: what headers leave, in multiples of 64.

    At most what a packet in shared memory has: where it isn't known by which link a message comes,
    room is made for the largest.
    """
    room = (mtu - IP_UDP_BYTES[ip_version] - HEADER_BYTES - TAG_BYTES) // 64 * 64
    return min(max(64, room), SHARED_PAYLOAD)


def datagram_payload(mtu: int) -> int:
    """Data bytes per packet of a link of datagrams of RDMA, sealed or not."""
    return max(64, (mtu - HEADER_BYTES - TAG_BYTES) // 64 * 64)

"""Packet size of a rank: by its interface's MTU, and by what its receive buffer holds."""

from __future__ import annotations

import logging
from typing import Final

from lossycoll.options.fields import Options
from lossycoll.runtime.engine.payload import AUTO_MTU_MAX, payload_bytes
from lossycoll.runtime.net.buffers import fitting_payload, packets_per_peer, receive_buffer
from lossycoll.runtime.net.interfaces import Interface

from .builder import GroupSpec
from .worlds import Attachment

log: Final = logging.getLogger("lossycoll")


def attachment(spec: GroupSpec, options: Options, interface: Interface) -> Attachment:
    """How a rank is attached to the network: by what interface, with packets of what size."""
    mtu = _mtu(spec, options, interface)
    return Attachment(interface, mtu, _payload(spec, options, interface, mtu))


def _mtu(spec: GroupSpec, options: Options, interface: Interface) -> int:
    mtu = options.mtu or min(interface.mtu, AUTO_MTU_MAX)
    if mtu > interface.mtu:
        log.warning(
            "%s: option mtu is %d, but that of %s is %d: larger packets are "
            "refused; lower LOSSYCOLL_MTU, or raise that of the interface",
            f"rank {spec.rank}/{spec.size}",
            mtu,
            interface,
            interface.mtu,
        )
    return mtu


def _payload(spec: GroupSpec, options: Options, interface: Interface, mtu: int) -> int:
    """Data bytes per packet that suit this rank: its MTU and its receive buffer."""
    largest = payload_bytes(mtu, interface.version)
    buffer = receive_buffer(options.socket_buffer, interface.version)
    payload = fitting_payload(largest, buffer, spec.size)
    if packets_per_peer(payload, buffer, spec.size) < 1:
        log.warning(
            "rank %d/%d: the receive buffer of %d bytes can't hold one packet of each of the %d "
            "other ranks, so some will be lost; raise sysctl net.core.rmem_max, and "
            "LOSSYCOLL_SOCKET_BUFFER if that is set",
            spec.rank,
            spec.size,
            buffer,
            spec.size - 1,
        )
    return payload

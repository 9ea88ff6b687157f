"""Everything that passes this machine's interfaces, as anybody sees it who may look: root."""

from __future__ import annotations

import os
import socket
import threading
from types import TracebackType

ETH_P_ALL = 3
SECONDS = 0.05


def can_sniff() -> bool:
    """Whether this process may see packets of all others."""
    return os.geteuid() == 0


class Sniffer:
    """A ``with`` block in which all bytes of all packets are kept, each packet by itself."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.settimeout(SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.packets: list[bytes] = []

    def __enter__(self) -> Sniffer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def shows(self, pattern: bytes) -> bool:
        """Whether some packet has these bytes."""
        return any(pattern in packet for packet in self.packets)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue

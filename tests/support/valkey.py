"""A server that speaks valkey's protocol, on a free port of this machine, for a test alone."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .waiting import until

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
TRIES = 5


class Server:
    """Serves from when it is made until ``close``; keeps nothing.

    Args:
        folder: Where it may write.
        password: "": none is wanted.
    """

    def __init__(self, folder: Path, password: str = "") -> None:
        if BINARY is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        self._folder = folder
        self._password = password
        for _ in range(TRIES):  # another process may take the port meanwhile
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
            if self.start():
                return
        raise AssertionError(f"{BINARY} doesn't start: {self._log()}")

    def start(self) -> bool:
        """Again after :meth:`kill`, on the same port. Returns whether it serves."""
        assert BINARY is not None
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder)]
        command += ["--requirepass", self._password] if self._password else []
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self._process.poll() is not None or self._serves(), "the server")
        return self._process.poll() is None

    def _serves(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as end:
                end.sendall(b"PING\r\n")
                return end.recv(1) in (b"+", b"-")
        except OSError:
            return False

    def _log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")[-2000:]

    def url(self, prefix: str = "tests", login: str = "") -> str:
        """By which a swarm joins."""
        return f"valkey://{login}127.0.0.1:{self.port}/{prefix}"

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """It answers nothing, and its connections stay."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._process.poll() is None:
            self.thaw()
            self.kill()

    def client(self) -> Any:
        """Of somebody who may write what he likes."""
        package = pytest.importorskip("valkey", reason="the package valkey isn't installed")
        return package.Valkey(port=self.port, password=self._password or None)

"""An interpreter that has imported torch already, and is started as any other: warm_python().

What is started is a small client of the server of forks (support/forks.py). It hands over its
arguments, environment, folder and standard streams, and a fork of the server runs them as an
interpreter would. A keeper between the two passes signals of the client on to the fork, tells the
client how the fork has ended, so that it ends likewise, and kills the fork when the client is gone.

A test of the start itself (what is imported when, or what torch reads when it is imported) needs
sys.executable, and so does one that looks for processes by their command.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and collections take longer to import than the client runs
    from collections.abc import Callable

LARGEST = 1 << 17
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGABRT)
STANDARD = (0, 1, 2)
LOST = 70


def client(address: str, arguments: list[str]) -> None:
    """The process that was started. ``address``: the server's, without the 0 of abstract ones."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        keeper.connect("\0" + address)
        for which in PASSED_ON:
            signal.signal(which, lambda number, _: keeper.send(bytes([number])))
        question = pickle.dumps((arguments, dict(os.environ), os.getcwd()))
        socket.send_fds(keeper, [question], STANDARD)
        answer = keeper.recv(LARGEST)
    status = int(answer) if answer else LOST
    if status < 0:
        with contextlib.suppress(OSError):  # of SIGKILL there is no other than the default
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(
    connection: socket.socket, executable: str, adopt: Callable[[dict[str, str]], None]
) -> None:
    """In a fork of the server: forks once more, and is the keeper of that process.

    Returns in that process only, once its program has ended. ``executable``: its sys.executable.
    ``adopt`` makes an environment the process's own.
    """
    question, streams, *_ = socket.recv_fds(connection, LARGEST, len(STANDARD))
    if pid := os.fork():
        _keep(connection, pid)
    connection.close()
    for own, given in zip(STANDARD, streams, strict=True):
        os.dup2(given, own)
        os.close(given)
    arguments, environment, folder = pickle.loads(question)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    sys.executable = executable
    servers = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path[1:] if path not in servers]
    adopt(environment)
    _become(arguments, folder, installed)


def _keep(connection: socket.socket, pid: int) -> None:
    import select

    ended = os.pidfd_open(pid)
    waited: list[socket.socket | int] = [connection, ended]
    while ended not in (ready := select.select(waited, [], [])[0]):
        assert connection in ready
        packet = connection.recv(1)
        os.kill(pid, packet[0] if packet else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def _become(arguments: list[str], folder: str, installed: list[str]) -> None:
    """Runs ``arguments``, those of an interpreter: [-u] (-m MODULE | -c CODE | FILE) ..."""
    import importlib.util
    import types

    ours = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]

    unbuffered = arguments[0] == "-u"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
    kind, *rest = arguments[unbuffered:]
    main = types.ModuleType("__main__")
    if kind == "-c":
        code, *rest = rest
        first, sys.argv = "", ["-c", *rest]
        program = compile(code, "<string>", "exec", dont_inherit=True)
    elif kind == "-m":
        name, *rest = rest
        first = folder
        sys.path[:] = [first, *ours, *installed]
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no module named {name}"
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None
        assert spec.origin is not None
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        sys.argv = [spec.origin, *rest]
        program = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    else:
        assert not kind.startswith("-"), f"a warm interpreter has no option {kind}"
        first, sys.argv = os.path.dirname(os.path.realpath(kind)), [kind, *rest]
        main.__file__ = kind
        with open(kind, "rb") as file:
            program = compile(file.read(), kind, "exec", dont_inherit=True)
    sys.path[:] = [first, *ours, *installed]
    sys.modules["__main__"] = main
    exec(program, main.__dict__)


if __name__ == "__main__":
    client(sys.argv[1], sys.argv[2:])

"""Runs a command in namespaces of another process: enter.py NAMESPACE... -- COMMAND...

A script of its own, run by path: what starts commands has threads, and nothing but this may happen
between fork and exec. It imports no more than it needs, as it runs once per command.
"""

import ctypes
import os
import sys


def main(arguments: "list[str]") -> None:
    end = arguments.index("--")
    libc = ctypes.CDLL(None, use_errno=True)
    # All of them are opened first: once in a user namespace, the others' owner may be out of sight.
    try:
        handles = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in arguments[:end]]
    except OSError:
        sys.exit("the laboratory has ended")
    for path, handle in zip(arguments, handles):  # noqa: B905 (more arguments than handles)
        if libc.setns(handle, 0):
            reason = os.strerror(ctypes.get_errno())
            sys.exit(f"cannot enter {path}: {reason}")
    # Who enters while it ends might otherwise be overlooked by it.
    if not all(map(os.path.exists, arguments[:end])):
        sys.exit("the laboratory has ended")
    command = arguments[end + 1 :]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])

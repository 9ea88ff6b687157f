"""A host of the study: ``python -m benchmarks.studies.swarm.preempted.host BY SEED``.

Has torch, BY's modules and the text loaded, and forks a peer whenever it is told to: all hosts
share this machine's cores, so that loading them anew would take what a machine of one's own
wouldn't. Is told
lines of JSON: ``{"start": CONFIG}`` and ``{"kill": true}``. Says what its peer says, and when it
has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

from . import peer


def _start(by: Any, config: dict[str, Any]) -> int:
    number = os.fork()
    if number:
        return number
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if config["serves"]:
            by.serve(config)
        else:
            peer.train(by, config)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _kill(number: int) -> None:
    """The peer with all processes that it has made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it hasn't a session of its own yet
        os.kill(number, signal.SIGKILL)


def main() -> None:
    by = importlib.import_module(f"{__package__}.by_{sys.argv[1]}")
    peer.warm_up(int(sys.argv[2]))
    peer.say("ready")
    number, text = 0, b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        if readable:
            came = os.read(0, 1 << 16)
            if not came:
                break
            *lines, text = (text + came).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "start" in told:
                    if number:  # it was killed, and is about to end
                        os.waitpid(number, 0)
                        peer.say("ended", code=-signal.SIGKILL)
                    number = _start(by, told["start"])
                elif number:
                    _kill(number)
        if number:
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                _kill(number)  # what it has left behind
                number = 0
                peer.say("ended", code=os.waitstatus_to_exitcode(status))
    if number:
        _kill(number)
        time.sleep(0.1)


if __name__ == "__main__":
    main()

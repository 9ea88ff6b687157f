"""The threads of ours that no test may leave (tests/conftest.py)."""

from __future__ import annotations

import threading

import pytest

from tests.conftest import our_threads
from tests.support.network import Network
from tests.support.waiting import until


def test_threads_of_engines_and_of_python_are_seen() -> None:
    before = our_threads().keys()
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=name) for name in ("lossycoll-x", "other")]
    for thread in threads:
        thread.start()
    with Network(2, 1408):
        until(lambda: len(our_threads().keys() - before) == 3)
        assert threads[0].native_id in our_threads()
        assert threads[1].native_id not in our_threads()
    until(lambda: our_threads().keys() - before == {threads[0].native_id})
    with pytest.raises(AssertionError, match="the end of it"):
        until(lambda: our_threads().keys() <= before, "the end of it", seconds=0.1)
    end.set()
    for thread in threads:
        thread.join()

"""Scopes in threads of autograd's, which get what torch's thread-local state has."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lossycoll
from lossycoll.backend import dispatch
from lossycoll.options import scopes
from lossycoll.options.scopes import Scope, scope

_torch: Any = torch._C


def in_a_thread_like_autograds(work: Callable[[], Any]) -> Any:
    """With this thread's state, as torch hands it over."""
    state, done, found = _torch._get_obj_in_tls(dispatch.SCOPE_KEY), threading.Event(), []

    def run() -> None:
        _torch._stash_obj_in_tls(dispatch.SCOPE_KEY, state)
        found.append(work())
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(10)
    return found[0]


@pytest.fixture(autouse=True)
def carried() -> None:
    assert scopes._offered == [(dispatch._stash, dispatch._stashed)]


def test_a_thread_that_works_for_the_caller_is_in_its_scope() -> None:
    with lossycoll.lossy(repair=3):
        outer = scope()
        assert outer is not None
        assert in_a_thread_like_autograds(scope) == outer
        with lossycoll.reliable():
            assert in_a_thread_like_autograds(scope) == scope() != outer
        assert in_a_thread_like_autograds(scope) == outer
    assert in_a_thread_like_autograds(scope) is None


def test_scopes_nest_in_it() -> None:
    def inner() -> tuple[Scope | None, Scope | None]:
        with lossycoll.reliable(repair=1):
            found = scope()
        return found, scope()

    with lossycoll.lossy(algorithm="ring"):
        found, after = in_a_thread_like_autograds(inner)
        assert after == scope()
    assert found is not None
    assert dict(found.changes) == {
        "algorithm": "ring",
        "delivery": "reliable",
        "repair": 1,
        "wire": "same",
    }


def test_other_threads_of_python_are_in_no_scope() -> None:
    found: list[object] = []
    with lossycoll.lossy():
        thread = threading.Thread(target=lambda: found.append(scope()))
        thread.start()
        thread.join()
    assert found == [None]


def test_torch_hands_it_to_the_threads_of_backward() -> None:
    """Where there is a device whose gradients are computed elsewhere; on the CPU in this thread."""
    seen: list[object] = []
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    x.register_hook(lambda _: seen.append(scope()))
    with lossycoll.lossy(repair=2):
        wanted = scope()
        y.backward()
    assert seen == [wanted]

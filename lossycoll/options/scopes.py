"""Scopes: ``with`` statements that change the options of the calls made in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from .fields import Options
from .schema import check, refused, row, unknown


@dataclass(frozen=True)
class Scope:
    """Changes that a scope makes."""

    changes: tuple[tuple[str, Any], ...]
    lossy_copies: bool

    def sets(self, name: str) -> bool:
        return any(name == changed for changed, _ in self.changes)


_scope: ContextVar[Scope | None] = ContextVar("lossycoll_scope", default=None)


Carrier = tuple[Callable[[Scope | None], None], Callable[[], Scope | None]]
_offered: list[Carrier] = []
_carriers: list[Carrier] = []
"""What was offered, once there is a scope to carry: few programs have one, and each call asks."""


def carry_by(put: Callable[[Scope | None], None], get: Callable[[], Scope | None]) -> None:
    """Has scopes carried to threads that work for the caller, and that no context of Python's
    reaches. ``put``: takes the scope that the calling thread is in from now on. ``get``: tells the
    scope of whom this thread works for, if it is such a thread."""
    _offered[:] = [(put, get)]
    if _carriers or _scope.get() is not None:
        _carry(_scope.get())


def scope() -> Scope | None:
    """The innermost scope that the caller is in, with what the outer ones changed as well."""
    found = _scope.get()
    return _carriers[0][1]() if found is None and _carriers else found


def within(options: Options, scope: Scope | None) -> Options:
    """The options of a group as ``scope`` changes them."""
    return options if scope is None else _changed(options, scope)


@lru_cache(maxsize=256)
def _changed(options: Options, scope: Scope) -> Options:
    return replace(options, **dict(scope.changes))


@contextlib.contextmanager
def _open(lossy_copies: bool, changes: Mapping[str, Any]) -> Iterator[None]:
    table = {entry.name: entry for entry in fields(Options)}
    for name in changes:
        if name not in table or not row(table[name]).per_call:
            known = [n for n, entry in table.items() if row(entry).per_call]
            raise unknown("option of a scope", name, known)
    checked = {n: check(table[n], v, f"option {n}") for n, v in changes.items()}
    outer = scope()
    merged = (dict(outer.changes) if outer else {}) | checked
    opened = Scope(tuple(sorted(merged.items())), lossy_copies)
    token = _scope.set(opened)
    _carry(opened)
    try:
        yield
    finally:
        _scope.reset(token)
        _carry(outer)


def _carry(scope: Scope | None) -> None:
    _carriers[:] = _offered
    for put, _ in _carriers:
        put(scope)


def reliable(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager in which collectives are exact: ``with lossycoll.reliable(): ...``.

    Nothing is lost, and nothing is rounded on the way (``wire``). The scope covers calls in every
    group by this thread (or asyncio task). Enter it on all ranks alike. Threads started inside it
    don't inherit it.

    Args:
        changes: Fields of :class:`Options` that may be set per scope, such as ``algorithm`` and
            ``wire``. Other options keep their values.

    Returns:
        A context manager, for one ``with`` statement. Scopes nest.

    Raises:
        OptionError: As for :func:`lossy`, but for ``delivery="lossy"``.
    """
    _check_delivery("reliable", "lossy", changes)
    return _open(False, {"wire": "same", **changes, "delivery": "reliable"})


def lossy(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager in which float reductions, broadcast and all_gather may lose packets.

    It applies to groups with ``delivery="reliable"`` as well. Where a packet of a broadcast or
    all_gather never arrives, the buffer keeps its old values. The same holds for a large send, if
    its receive is posted in such a scope, too. The rules for threads and ranks are those of
    :func:`reliable`.

    Args:
        changes: Fields of :class:`Options` that may be set per scope, such as ``repair``,
            ``on_missing``, ``wire`` and ``lossy_min_bytes``. Other options keep their values.

    Returns:
        A context manager, for one ``with`` statement. Scopes nest.

    Raises:
        OptionError: Another name, a value that isn't allowed, or ``delivery="reliable"``. A bad
            ``delivery`` raises it at once, others when the scope is entered.
    """
    _check_delivery("lossy", "reliable", changes)
    return _open(True, {**changes, "delivery": "lossy"})


def _check_delivery(wanted: str, other: str, changes: Mapping[str, Any]) -> None:
    """Refuses a scope of another delivery than its name says."""
    delivery = changes.get("delivery", wanted)
    if delivery != wanted:
        there = "nothing is lost" if other == "reliable" else "packets may be lost"
        raise refused(
            f"option delivery is {delivery!r} in a scope of lossycoll.{wanted}(), wanted {wanted}; "
            f"lossycoll.{other}() opens a scope in which {there}"
        )

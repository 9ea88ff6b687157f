"""Groups whose members are connected: made without the store, a message, or a word of the others.

Each rank derives the same numbers by itself, from the group that all members are of (the parent)
and the name that torch gives the new one. Options and members are compared by the first operation.
docs/rendezvous.md has the reasons.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lossycoll.errors import OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.host import HOST_OPTIONS
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.messages import View

from .builder import GroupBuilder, GroupSpec, Parent, World, written_in
from .group_steps import fault_group, member_of, read_options


@contextlib.contextmanager
def connected(builder: GroupBuilder, pg_options: object) -> Iterator[bool]:
    """Fills in what a meeting would tell, without one; the world lasts as long as the context.

    False: they meet in the store. Either they have no parent here, or all of them ask for a host
    of their own; whether a rank does, the others hear from it. Raises a LossyError where this rank
    or another one can't take part; whoever doesn't know yet is told.
    """
    parent = builder.spec.parent
    if parent is None or not parent.world.hold():
        yield False
        return
    try:
        yield _fill_in(builder, parent, pg_options)
    finally:
        parent.world.release()


def _fill_in(builder: GroupBuilder, parent: Parent, pg_options: object) -> bool:
    spec, undo, world = builder.spec, builder.undo, parent.world
    members = tuple(parent.numbers[rank] for rank in spec.global_ranks)
    session = parent.next_session(spec.name)
    try:
        if builder.unusable is not None:
            raise builder.unusable
        options = read_options(spec, pg_options, [world])
        asked = _own_host(options, pg_options, world)
        if builder.secret is not None and not (world.host.is_sealed or asked):
            raise OptionError(
                f"rank {spec.rank}/{spec.size}: a secret is set now, and was not when the group "
                f"was made whose part this is: set it before init_process_group"
            )
    except Exception:
        member_of(undo, world.plane, session, members)  # it tells the others
        raise
    if asked:
        # A rank that doesn't ask wouldn't come to the store; it ends the group when it hears of it.
        with contextlib.ExitStack() as stack:
            membership = member_of(stack, world.plane, session, members)
            listener = _Askers(spec, world, members)
            membership.open(listener)
            membership.own_host(asked)
            listener.wait(spec.timeout.total_seconds())
        return False
    builder.session, builder.options, builder.network = session, options, world.network
    builder.definition, builder.number = spec.defined(options), fault_group(spec.name)
    builder.world, builder.plane, builder.members = world, world.plane, members
    builder.shares = True
    return True


def _own_host(options: Options, pg_options: object, world: World) -> dict[str, Any]:
    """The options by which a group asks for a host of its own; empty: the world's will do.

    What is written for this group counts also where it is the world's already: on other ranks,
    whose environments differ, it may not be.
    """
    written = written_in(pg_options)
    return {
        name: getattr(options, name)
        for name, of_world in zip(HOST_OPTIONS, world.host.options, strict=True)
        if name in written or getattr(options, name) != of_world
    }


class _Askers(Health):
    """Health of a group without calls, whose ranks ask for a host of their own."""

    def __init__(self, spec: GroupSpec, world: World, members: tuple[int, ...]) -> None:
        self._changed = threading.Event()
        self._missing = set(range(spec.size)) - {spec.rank}
        super().__init__(
            spec.rank,
            spec.size,
            addresses=[world.host.addresses[member] for member in members],
            liveness=world.plane.liveness,
            control=None,
            on_failure=lambda _: self._changed.set(),
        )

    def on_round(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:  # type: ignore[override]
        self.on_dead(rank, silent, ended)
        return 0

    def on_views(self, views: Sequence[View], agreed: bool) -> None:
        pass

    def on_own_host(self, rank: int, options: Mapping[str, Any]) -> None:
        del options
        self._missing.discard(rank)
        if not self._missing:
            self._changed.set()

    def wait(self, seconds: float) -> None:
        """Returns when all have asked."""
        if not self._changed.wait(seconds):
            raise RendezvousError(
                f"{self.where}: ranks {sorted(self._missing)} have not come after "
                f"{seconds:g} s; do all ranks make this group?",
                peer=min(self._missing),
            )
        if self.failure is not None:
            raise self.failure

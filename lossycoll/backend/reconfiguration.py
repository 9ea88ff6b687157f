"""Groups whose members change, by torch's contract: handles, and their order.

Each process has a handle. Whoever steers the job hands all members of the next group the same list
of handles and a number (uuid) that no group had before; a process's rank is its handle's place in
the list. Members meet in the store that the group was made with, below a key of the number and the
list: so two parts of a job that go on with one number each (split brain) never meet by accident.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lossycoll.errors import (
    AbortedError,
    ClosedError,
    LossyError,
    OperationTimeout,
    OptionError,
    RendezvousError,
    UnsupportedError,
)
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.keys.secret import find_secret
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.polled_store import PolledStore

from .bootstrap import Group
from .builder import GroupSpec
from .devices import ServedDevices
from .overloads import c10d, opaque
from .work import ManyWork

_FORM: Final = re.compile(
    r"lossy:(?P<job>[0-9a-f]{16}):(?P<incarnation>[0-9a-f]{16}):(?P<process>\S{1,300})"
)
MOST_MEMBERS: Final = 1 << 16


class Handle(NamedTuple):
    """One process, as it tells the others of itself."""

    job: str  # The store's number, which all who share the store have
    incarnation: str  # The process's, which no other process has had
    process: str  # Its host and pid, for errors

    def __str__(self) -> str:
        return f"lossy:{self.job}:{self.incarnation}:{self.process}"


def parsed(text: object) -> Handle | None:
    """The handle that ``text`` is; None: it is none of this backend's."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else Handle(**found.groupdict())


class Reconfiguration:
    """One process's way from group to group."""

    def __init__(self, spec: GroupSpec) -> None:
        self.lock: Final = threading.Lock()
        """Held by who reconfigures."""
        self._spec = spec
        self._used: set[int] = set()
        self._secret = find_secret()
        self._incarnation = secrets.token_hex(8)
        self._handle: Handle | None = None
        self._listed: tuple[int, tuple[str, ...]] = 0, ()
        import_module("zmq")  # 20 ms, for which there is no time while others wait for it

    def handle(self) -> Handle:
        """This process's, which stays the same."""
        if self._handle is None:
            store = self._store("job")
            store.set_first("number", secrets.token_hex(8))
            job = store.get("number") or ""
            process = f"{socket.gethostname()}/{os.getpid()}"
            handle = Handle(job, self._incarnation, process)
            if parsed(str(handle)) is None:
                raise RendezvousError(
                    f"{self._who}: the store's key reconfigure/job/number holds {job!r}, which "
                    f"no rank wrote; do all ranks have the same LOSSYCOLL_SECRET?"
                )
            self._handle = handle
        return self._handle

    def no_members(self) -> ClosedError:
        """Why there can't be a call before the first group."""
        return ClosedError(
            f"{self._who}: the group was made with enable_reconfigure=True and has no members "
            f"yet; call torch.distributed._reconfigure with the handles of its members first"
        )

    def next_spec(self, uuid: int, handles: Any, timeout: timedelta | None) -> GroupSpec:
        """Specification of the next group here. ``timeout``: for its meeting; None: the group's."""
        if uuid in self._used:
            raise self._wrong(f"uuid {uuid} was already used here; every group needs a fresh one")
        listed = list(handles) if isinstance(handles, Sequence) else sorted(handles)
        own = self.handle()
        if not 0 < len(listed) <= MOST_MEMBERS:
            raise self._wrong(f"got {len(listed)} handles, wanted 1 to {MOST_MEMBERS}")
        first: dict[str, int] = {}
        for at, text in enumerate(listed):
            member = parsed(text)
            if member is None:
                raise self._wrong(
                    f"handle {at} is {str(text)[:80]!r}, which no group of backend 'lossy' gave; "
                    f"take them from torch.distributed._get_reconfigure_handle"
                )
            if member.job != own.job:
                raise self._wrong(
                    f"handle {at} is of {member.process}, which uses another store (job "
                    f"{member.job}, here {own.job}); members of one group need one store"
                )
            before = first.setdefault(member.incarnation, at)
            if before != at:
                raise self._wrong(f"handles {before} and {at} are the same process's, {member}")
        rank = first.get(own.incarnation)
        if rank is None:
            raise self._wrong(
                f"this process's handle {own} is not among the {len(listed)} handles; leave it "
                f"out of the call, or ask for its handle again"
            )
        self._used.add(uuid)
        self._listed = uuid, tuple(first)
        with_values = self._store(str(uuid))
        with_values.set(own.incarnation, json.dumps(self._digest))
        return replace(
            self._spec,
            store=PrefixStore(f"reconfigure/{uuid}/{self._digest}", self._spec.store),
            rank=rank,
            size=len(first),
            timeout=self._spec.timeout if timeout is None else timeout,
            global_ranks=tuple(range(len(first))),
            parent=None,
        )

    def failed(self, error: LossyError) -> ClosedError:
        """Why there can't be a call after ``error``, by which the last group wasn't made. It gets
        the ranks that were given another list of handles, if there are any."""
        uuid, members = self._listed
        with contextlib.suppress(RendezvousError):
            store, here = self._store(str(uuid)), (None, json.dumps(self._digest))
            others = [at for at, one in enumerate(members) if store.get(one) not in here]
            if others:
                error.args = (
                    f"{error}; ranks {others} were given other handles, or in another order, for "
                    f"uuid {uuid}: all members need the same list",
                )
        return ClosedError(
            f"{self._who}: the group has no members, as reconfiguration {uuid} failed: {error}; "
            f"reconfigure with a fresh uuid"
        )

    @property
    def _digest(self) -> str:
        uuid, members = self._listed
        return blake2b(f"{uuid} {' '.join(members)}".encode(), digest_size=8).hexdigest()

    @property
    def _who(self) -> str:
        return f"rank {self._spec.rank}/{self._spec.size}"

    def _wrong(self, what: str) -> OptionError:
        return OptionError(f"{self._who}: reconfigure: {what}")

    def _store(self, name: str) -> PolledStore:
        prefix = PrefixStore(f"reconfigure/{name}", self._spec.store)
        return PolledStore(prefix, self._who, self._secret)


@opaque
class Reconfigurable:
    """A base of LossyProcessGroup, which sets the attributes."""

    _reconfiguration: Reconfiguration | None
    _abort_hooks: dict[int, Callable[[], object]]
    _group: Group
    _endpoint: Endpoint
    _health: Health
    _where: Where
    _devices: ServedDevices
    _take: Callable[[GroupSpec, Group], None]
    shutdown: Callable[[], None]

    def get_error(self) -> Any:
        """Return torch's ErrorType of the group's failure."""
        failure, kinds = self._health.failure, c10d.ErrorType
        if failure is None or isinstance(failure, (AbortedError, ClosedError)):
            return kinds.SUCCESS
        return kinds.TIMEOUT if isinstance(failure, OperationTimeout) else kinds.COMM_ERROR

    def registerAbortHook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Register ``hook`` to be called once when the group fails, before calls raise."""
        self._abort_hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:
        """Unregister a hook; without one, do nothing."""
        self._abort_hooks.pop(hook_id, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    @property
    def supports_reconfigure(self) -> bool:
        """True if the group's members can change: it was made with ``enable_reconfigure=True``."""
        return self._reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """Return this process's name in the list of the next group's members."""
        return str(self._steps().handle())

    def reconfigure(self, opts: Any) -> dist.Work:
        """Leave the members, meet with others, and return when all are there.

        Calls in flight fail with AbortedError. If the next group can't be made, there is none; try
        again with another number (uuid).
        """
        steps = self._steps()
        with steps.lock:
            spec = steps.next_spec(opts.uuid, opts.handles, opts.timeout)
            left = self._group
            self._fail_what_is_in_flight("reconfigured")
            self._devices.close()
            try:
                group = Group(spec)
            except LossyError as error:
                self._take(spec, Group(spec, steps.failed(error)))
                raise
            else:
                self._take(spec, group)
            finally:
                # Not before: what members still owe each other goes on, and so do their sockets.
                start_thread(left.close, "lossycoll-left")
        return ManyWork([], [])

    def lossy_leave(self) -> None:
        """Leave the group like ``shutdown``, but without waiting for the other members: data that
        they still need from this rank is sent meanwhile. Calls in flight fail."""
        self._fail_what_is_in_flight("left")
        start_thread(self.shutdown, "lossycoll-left")

    def _fail_what_is_in_flight(self, how: str) -> None:
        if any(not one.done for one in list(self._endpoint.operations.unfinished.values())):
            text = f"{self._where}: the group was {how} while calls were in flight"
            self._health.fail(AbortedError(text, peer=self._where.rank), tell=True)

    def _steps(self) -> Reconfiguration:
        if self._reconfiguration is None:
            raise UnsupportedError(
                f"{self._where}: the members of this group can't change; give "
                f"enable_reconfigure=True to init_process_group"
            )
        return self._reconfiguration

"""A group whose members change, by torch's contract: the same object goes on with other processes.

docs/backend.md says what becomes of calls in flight; ``reconfiguration.py`` checks who meets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import (
    AbortedError,
    ClosedError,
    LossyError,
    OperationTimeout,
    UnsupportedError,
)
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.exits import start_thread
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.world.group_state import Health

from .bootstrap import Group
from .builder import GroupSpec
from .delegates import DelegateBackends
from .dynamo_skip import opaque
from .reconfiguration import Reconfiguration
from .work import ManyWork

_c10d: Any = c10d  # its stub lacks half of what is used here


@opaque
class Reconfigurable:
    """A base of LossyProcessGroup, which sets the attributes."""

    _pg_options: object
    _reconfiguration: Reconfiguration | None
    _abort_hooks: dict[int, Callable[[], object]]
    _group: Group
    _endpoint: Endpoint
    _health: Health
    _where: Where
    _others: DelegateBackends

    def _take(self, spec: GroupSpec, group: Group) -> None:
        raise NotImplementedError

    def get_error(self) -> Any:
        """torch's ErrorType of the group's failure.

        Returns:
            SUCCESS also after an abort, whoever asked for it, and while there are no members.
        """
        failure, kinds = self._health.failure, _c10d.ErrorType
        if failure is None or isinstance(failure, (AbortedError, ClosedError)):
            return kinds.SUCCESS
        return kinds.TIMEOUT if isinstance(failure, OperationTimeout) else kinds.COMM_ERROR

    def registerAbortHook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Has ``hook`` called when the group fails, once, before calls raise.

        Args:
            hook_id: Its number, for :meth:`unregisterAbortHook`.
            hook: Must be quick.
        """
        self._abort_hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:
        """Takes a hook back; nothing where there is none.

        Args:
            hook_id: As it was registered.
        """
        self._abort_hooks.pop(hook_id, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group's members can change: it was made with ``enable_reconfigure=True``."""
        return self._reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """What this process is called in the list of a next group's members.

        Returns:
            The same text in every group, which no other process has.

        Raises:
            UnsupportedError: The group's members can't change.
            RendezvousError: The store fails.
        """
        return self._steps().handle()

    def reconfigure(self, opts: Any) -> dist.Work:
        """Leaves the members, and meets with others; returns when all are there.

        Calls in flight fail with AbortedError. If the next group can't be made there is none, and
        another number (uuid) may do.

        Args:
            opts: torch's ReconfigureOptions. ``handles`` in a list are in the order of ranks; the
                members of the next group need the same.

        Returns:
            A work that is done.

        Raises:
            UnsupportedError: The group's members can't change.
            OptionError: The number was used before, or the handles can't be.
            LossyError: The group can't be made.
        """
        steps = self._steps()
        with steps.lock:
            spec = steps.next_spec(opts.uuid, opts.handles, opts.timeout)
            left = self._group
            self._fail_what_is_in_flight("reconfigured")
            self._others.close()
            try:
                group = Group(spec, self._pg_options)
            except LossyError as error:
                self._take(spec, Group(spec, self._pg_options, steps.failed(error)))
                raise
            else:
                self._take(spec, group)
            finally:
                # Not before: what members still owe each other goes on, and so do their sockets.
                start_thread(left.close, "lossycoll-left")
        return ManyWork([], [])

    def lossy_leave(self) -> None:
        """Leaves the group as ``shutdown`` does, without a wait for the other members: what they
        still need of this rank is sent meanwhile. Calls in flight fail."""
        self._fail_what_is_in_flight("left")
        start_thread(self.shutdown, "lossycoll-left")

    def _fail_what_is_in_flight(self, how: str) -> None:
        if any(not one.done for one in list(self._endpoint.operations.unfinished.values())):
            text = f"{self._where}: the group was {how} while calls were in flight"
            self._health.fail(AbortedError(text, peer=self._where.rank), tell=True)

    def shutdown(self) -> None:
        """LossyProcessGroup's."""
        raise NotImplementedError

    def _steps(self) -> Reconfiguration:
        if self._reconfiguration is None:
            raise UnsupportedError(
                f"{self._where}: the members of this group can't change; give "
                f"enable_reconfigure=True to init_process_group"
            )
        return self._reconfiguration

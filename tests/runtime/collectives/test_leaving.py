"""Leaving a group: what was interrupted is finished, and nothing is said twice."""

from __future__ import annotations

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.world.group_state import Health
from tests.support.planes import planes
from tests.support.waiting import until


def test_a_close_that_ctrl_c_cut_short_is_finished_by_the_next() -> None:
    with planes(2) as s:
        group = s.groups[1]
        health = Health(
            1, 2, addresses=["a", "b"], liveness=30.0, control=group, on_failure=lambda _: None
        )
        context = GroupContext(health, Options(), 0, None, group, Topology.flat(2))
        made = Endpoint(context, timeout=9.0)

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        health.await_others = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.close()
        made.close()  # without another goodbye
        thread = s.planes[1]._thread
        assert thread is not None
        assert not thread.is_alive()
        made.close()
        until(lambda: s.notes[0].log == [("bye", 1, -1)])

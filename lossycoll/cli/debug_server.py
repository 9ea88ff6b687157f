"""Pages of a job for torch's debug server (torch.distributed.debug).

Each rank's worker server answers for the ranks on its machine, from their status pages; the
frontend puts the answers together. The server asks for no secret. Importing this fails where torch
has no such server, or a package that it needs is missing.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any, Final

from torch._C import _distributed_c10d
from torch.distributed.debug import _debug_handlers, _frontend

from lossycoll.runtime.engine import status_page
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.world import flight_recorder, job_status

from .status import as_text

_c10d: Any = _distributed_c10d
theirs: Any = _debug_handlers
frontend: Any = _frontend
ENDPOINT: Final = "lossycoll_records"
STATUS_TEMPLATE: Final = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}lossycoll{% endblock %}</h1>{% endblock %}
{% block content %}
    {% if fetch_summary %}<pre>{{ fetch_summary | e }}</pre>{% endif %}
    <pre>{{ text | e }}</pre>
{% endblock %}
"""
TABLES: Final = {
    "groups": theirs.Group,
    "memberships": theirs.Membership,
    "collectives": theirs.Collective,
    "ncclcalls": theirs.NCCLCall,
}


def handlers() -> list[Any]:
    """Handlers of torch's debug server, and of this module."""
    return [*theirs.default_handlers(), Handler()]


class Handler(_frontend.DebugHandler):
    """Two pages: what each rank does and for whom it waits, and the latest calls of all ranks, as
    torch's flight recorder compares them."""

    def routes(self) -> list[Any]:
        pages = {"/lossycoll": self._status, "/lossycoll_fr_trace": self._calls}
        return [frontend.Route(path, page) for path, page in pages.items()]

    def nav_links(self) -> list[Any]:
        return [
            frontend.NavLink("/lossycoll", "lossycoll"),
            frontend.NavLink("/lossycoll_fr_trace", "FlightRecorder lossycoll"),
        ]

    def templates(self) -> dict[str, str]:
        return {"lossycoll.html": STATUS_TEMPLATE, "fr_trace.html": theirs.FR_TRACE_TEMPLATE}

    def dump(self) -> str | None:
        """The first page as text, for a server that writes files."""
        summary, text = self._text()
        return f"{summary}\n\n{text}" if summary else text

    def dump_filename(self) -> str:
        return "lossycoll"

    def _text(self) -> tuple[str | None, str]:
        summary, records = fetched(self.fetch_timeout)
        return summary, as_text(job_status.jobs_of(records))

    def _status(self, request: Any) -> Any:
        summary, text = self._text()
        return request.frontend.render_template("lossycoll.html", fetch_summary=summary, text=text)

    def _calls(self, request: Any) -> Any:
        summary, records = fetched(self.fetch_timeout)
        dumps = flight_recorder.dumps(records)
        answers = [frontend.Response(200, json.dumps(dump)) for dump in dumps.values()]
        found = theirs.FlightRecorderHandler._build_db([str(rank) for rank in dumps], answers)
        tables = {
            name: theirs.tabulate(getattr(found, name), headers=kind._fields, tablefmt="html")
            for name, kind in TABLES.items()
        }
        return request.frontend.render_template(
            "fr_trace.html", title="FlightRecorder lossycoll", fetch_summary=summary, **tables
        )


def fetched(timeout: float) -> tuple[str | None, list[Record]]:
    places, answers = frontend.fetch_all(ENDPOINT, timeout=timeout)
    told = [json.loads(one.text) for one in answers if one.status_code == 200]
    found = [Record.from_json(record) for records in told for record in records]
    return frontend.format_fetch_summary(places, answers), found


def own_records() -> str:
    """Records of a rank's jobs on its machine, as its worker server answers."""
    records = status_page.pages(calls=True)
    mine = {record.session for record in records if record.pid == os.getpid()}
    return json.dumps([record.to_json() for record in records if record.session in mine])


def _answer(request: Any, response: Any) -> None:
    del request
    response.set_content(own_records(), "application/json")
    response.set_status(200)


# torch's table of handlers outlives Python, and must not be the last that lets go of one.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
_c10d._register_handler(ENDPOINT, _answer)

"""What there is of RDMA: each port as a rank would open it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import Finding, Severity, good_if

if TYPE_CHECKING:
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.rdma_ports import Port


def rdma() -> list[Finding]:
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options
    from lossycoll.runtime.net.rdma_ports import ports

    have = ports()
    if not have:
        return [Finding("RDMA", Severity.OK, "no devices; packets go by UDP")]
    try:
        options = Options.from_env()
    except OptionError:
        options = Options()  # the variables have their own line
    return [_port(port, options) for port in have]


def _port(port: Port, options: Options) -> Finding:
    from lossycoll.errors import EngineError
    from lossycoll.runtime.engine.verbs_port import VerbsPort, memory_limit
    from lossycoll.runtime.net.rdma_ports import ACTIVE, usable_gids

    name = f"RDMA {port}"
    if port.state != ACTIVE:
        return Finding(name, Severity.OK, f"{port.layer}, {port.state}: it is not used")
    gids = usable_gids(port)
    if not gids:
        advice = "give its interface an IP address, so that it has a GID of RoCE v2"
        return Finding(name, Severity.WARN, f"{port.layer}, no GID of RoCE v2", advice)
    try:
        opened = VerbsPort(port.device, port.number, gids[0].index, library=options.libibverbs)
    except EngineError as error:
        return Finding(name, Severity.WARN, f"{port.layer}, not usable", str(error))
    opened.close()
    found = (
        f"{port.layer}, GID {', '.join(map(str, gids))}; datagrams of {opened.mtu} bytes, "
        f"{opened.queue} may wait (memory that may be locked: {memory_limit()})"
    )
    advice = (
        f"{opened.queue_wanted} datagrams should have room: raise ulimit -l, LimitMEMLOCK= of "
        f"systemd, or --ulimit memlock=-1 of a container"
    )
    return good_if(opened.queue == opened.queue_wanted, name, found, Severity.WARN, advice)

"""The job's secret as a group is made: whether it can be used, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.aead import check_library
from lossycoll.runtime.keys.secret import Secret, find_secret

log: Final = logging.getLogger("lossycoll")
_warned: Final[list[Where]] = []
"""The first group that sends in clear, once it was warned of."""


def usable_secret(pg_options: object) -> tuple[Secret | None, OptionError | None]:
    """The job's secret, or why what is set can't be used: the other ranks are to hear of that."""
    try:
        options = Options.resolve(pg_options)
    except OptionError:  # which is told under the secret
        options = Options()
    try:
        found = find_secret()
        if found is not None:
            check_library(options.libcrypto, options.cipher)
    except OptionError as error:
        return None, error
    return found, None


def fields_of_seal(host: Host, options: Options, listens: tuple[str, int]) -> dict[str, Any]:
    """Fields of ``ready`` where packets are sealed: with what, and where new keys are asked for."""
    if not host.is_sealed:
        return {}
    return {"sealed": options.cipher, "control": f"{listens[0]}:{listens[1]}"}


def warn_of_clear(where: Where, addresses: Sequence[str]) -> None:
    """Rank 0 warns of packets that leave its machine in clear, once in a process."""
    machines = {address.rpartition(":")[0] for address in addresses}
    if where.rank == 0 and len(machines) > 1 and not _warned:
        _warned.append(where)
        log.warning(
            "%s: nothing is sealed between %d addresses: whoever can send to them can change "
            "results; set LOSSYCOLL_SECRET on all ranks (`lossycoll keygen` makes one)",
            where,
            len(machines),
        )

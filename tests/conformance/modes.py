"""The ways in which the suite is run: a backend and the options that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mode:
    """``env``: variables that the ranks get. ``meaning``: what the documentation says of it.

    ``places``: further variables, a letter of whose value each rank gets, by its number.

    ``on_page``: not where the suite's sums of large tensors are wrong by design; the chosen tests
    of tests/conformance/test_conformance.py run in such a mode.
    """

    name: str
    backend: str
    meaning: str
    env: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    on_page: bool = True

    def env_of(self, rank: int) -> dict[str, str]:
        """What this rank gets beside ``env``."""
        return {name: letters[rank] for name, letters in self.places.items()}

    @property
    def inject(self) -> bool:
        """Whether packets are lost on purpose."""
        return _INJECT in self.env


@dataclass(frozen=True)
class Choice:
    """A choice of tests: torch makes it when the suite is imported for the backend ``named``.

    ``env_name``: BACKEND while a test runs; only the limit on the world size still looks at it.
    ``reason``: begins the reason for which the first choice leaves out what this one is to run.
    """

    name: str
    named: str
    env_name: str
    meaning: str
    reason: str = ""


CHOICES = {
    choice.name: choice
    for choice in (
        Choice("gloo", "gloo", "gloo", "what torch chooses for gloo"),
        Choice(
            "groups",
            "gloo",
            "mpi",
            "what torch runs only from 8 ranks on (or with MPI): groups of 2 of the ranks",
            "Skipped due to small world size",
        ),
        Choice("mpi", "mpi", "mpi", "what torch runs on CPUs for MPI only", "Only MPI supports"),
    )
}

_DELIVERY = "LOSSYCOLL_DELIVERY"
_INJECT = "LOSSYCOLL_INJECT"

MODES = {
    mode.name: mode
    for mode in (
        Mode("gloo", "gloo", "torch's own backend for CPUs, for comparison"),
        Mode("reliable", "lossy", "`LOSSYCOLL_DELIVERY=reliable`", {_DELIVERY: "reliable"}),
        Mode(
            "default",
            "lossy",
            "no options: float sums of 16 KiB or more may lose packets, but none are lost",
        ),
        Mode(
            "reliable-loss",
            "lossy",
            "reliable delivery, while 5% of all data packets are lost",
            {_DELIVERY: "reliable", _INJECT: "loss=0.05,seed=7"},
        ),
        Mode(
            "default-loss",
            "lossy",
            "default delivery, while 5% of all data packets are lost",
            {_INJECT: "loss=0.05,seed=7"},
            on_page=False,
        ),
        Mode(
            "all-lossy",
            "lossy",
            "default delivery, and no float sum is too small for it (`lossy_min_bytes=0`)",
            {"LOSSYCOLL_LOSSY_MIN_BYTES": "0"},
        ),
        Mode(
            "two-hosts",
            "lossy",
            "reliable delivery, 2 hosts, the first with ranks 0 and 1",
            {_DELIVERY: "reliable"},
            {"LOSSYCOLL_HOST": "aabb"},
            on_page=False,
        ),
        Mode(
            "two-sites",
            "lossy",
            "reliable delivery, 2 sites of 2 hosts of one rank",
            {_DELIVERY: "reliable"},
            {"LOSSYCOLL_HOST": "abcd", "LOSSYCOLL_SITE": "eeff"},
            on_page=False,
        ),
    )
}

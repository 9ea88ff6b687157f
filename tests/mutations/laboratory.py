"""The laboratory of hosts and networks."""

from __future__ import annotations

from .model import mutation

LABORATORY = (
    mutation(
        "the downlinks of sites are skipped",
        "native/lab/paths.c",
        "sent.stage = LAB_SITE_DOWN;",
        "sent.stage = LAB_DOWN;",
        "native:test_lab",
    ),
    mutation(
        "links between sites are those within",
        "lossycoll/lab/network.py",
        "usual = self.wan if self.is_far(sender, receiver) else self.link",
        "usual = self.link",
        "tests/lab/test_network.py::test_between_sites_is_another_network",
    ),
    mutation(
        "ranks of a host think that they are alone there",
        "lossycoll/lab/job.py",
        '"LOCAL_RANK": str(local),',
        '"LOCAL_RANK": "0",',
        "tests/lab/test_network.py::test_ranks_are_told_their_place",
    ),
)

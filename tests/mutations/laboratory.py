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
    mutation(
        "policers delay packets as queues do",
        "native/lab/paths.c",
        "        if (!rate->polices)\n            piece->at = queue->free_at;",
        "        piece->at = queue->free_at;",
        "native:test_lab",
    ),
    mutation(
        "a change on the way lasts for its moment only",
        "lossycoll/cli/lab.py",
        "        network = _changed(network, text)\n        out.append((seconds, text, network))",
        "        out.append((seconds, text, _changed(network, text)))",
        "tests/cli/test_lab.py::test_changes_are_put_in_order_and_add_up",
    ),
    mutation(
        "what a policer drops is nobody's",
        "lossycoll/lab/report.py",
        "sum(one.policed for one in sent)",
        "0",
        "tests/lab/test_report.py::test_each_packet_is_in_one_row",
    ),
)

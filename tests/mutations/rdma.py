"""Mistakes of the link of RDMA, each with a test that sees it."""

from __future__ import annotations

from .model import mutation

LINK = "native:test_link_verbs"
JOB = "tests/backend/test_rdma.py"

RDMA = (
    mutation(
        "a datagram of any address is the peer's",
        "native/link_verbs_move.c",
        "return !memcmp(grh + IPV4_SOURCE, gid + 12, 4);",
        "return 1;",
        LINK,
    ),
    mutation(
        "a payload that is filled again while a request reads it",
        "native/link_verbs_move.c",
        "v->users[*holder]++;\n",
        "",
        LINK,
    ),
    mutation(
        "credit for buffers that aren't back at the device",
        "native/link_verbs.c",
        "uint32_t usable = v->queue - LC_VERBS_RETURN - LC_RECEIVE_BUFFERS;",
        "uint32_t usable = v->queue + LC_VERBS_RETURN;",
        LINK,
    ),
    mutation(
        "a datagram beyond the MTU, which the device swallows",
        "native/link_verbs_move.c",
        "return iov[FIRST].iov_len + iov[SECOND].iov_len > v->mtu;",
        "return iov[FIRST].iov_len + iov[SECOND].iov_len > 2 * v->mtu;",
        LINK,
    ),
    mutation(
        "who sleeps isn't woken after another thread used the link",
        "native/link_verbs_move.c",
        "if (v->context->req_notify_cq(v->receive_cq, 0))",
        "if (v->looked_ns && v->context->req_notify_cq(v->receive_cq, 0))",
        LINK,
    ),
    mutation(
        "a greeting of another meeting is believed",
        "native/greeting.c",
        "g.token != m->token || ",
        "",
        LINK,
    ),
    mutation(
        "a queue pair that stands still after an error",
        "native/link_verbs_move.c",
        "    else if (bad)\n        lc_verbs_begin_anew(v);\n",
        "",
        LINK,
    ),
    mutation(
        "greetings smaller than packets",
        "lossycoll/backend/rdma.py",
        "where.rank, size, GREETING_SECONDS",
        "where.rank, 256, GREETING_SECONDS",
        f"{JOB}::test_a_network_that_carries_less",
    ),
    mutation(
        "a partition's number with its bytes the other way round",
        "native/link_verbs.c",
        "be16toh(partition)",
        "partition",
        f"{JOB}::test_partitions_that_are_one",
    ),
    mutation(
        "whoever has heard all answers nobody who didn't",
        "native/greeting.c",
        "if (!(g.state & ANSWERED))",
        "if (!(g.state & HEARD))",
        LINK,
    ),
    mutation(
        "a payload sealed for one receiver goes to another",
        "native/stream_out.c",
        "out->slot->contents && !via->tag_bytes;",
        "out->slot->contents != 0;",
        "tests/runtime/engine/test_verbs.py::test_engine_equals_reference",
    ),
    mutation(
        "packets of RDMA's size where some go by UDP",
        "lossycoll/backend/rdma.py",
        "complete = len(pairs) == where.world * (where.world - 1)",
        "complete = bool(pairs)",
        f"{JOB}::test_one_without_goes_by_udp",
    ),
)

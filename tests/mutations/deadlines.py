"""How long a stream is waited for: each rule of lc_overdue, and what excuses a silence."""

from __future__ import annotations

from .model import mutation

STREAM = "native/stream_in.c"
OVERDUE = "native:test_overdue"

DEADLINES = (
    mutation(
        "streams that wait in their sender's queue are given up, if needed",
        STREAM,
        "    if (!in->started_ns && !in->fin_ns) /*",
        "    if (0) /*",
        OVERDUE,
    ),
    mutation(
        "what is needed is waited for since its last packet, which may be none",
        STREAM,
        "lc_later(in->last_ns, op->started_ns);",
        "in->last_ns;",
        OVERDUE,
    ),
    mutation(
        "what is needed is waited for since the call began",
        STREAM,
        "lc_later(in->last_ns, op->started_ns);",
        "op->started_ns;",
        OVERDUE,
    ),
    mutation(
        "nothing excuses that what is needed doesn't come",
        STREAM,
        "lc_later(came, excused) > config",
        "came > config",
        OVERDUE,
    ),
    mutation(
        "a stream without packets is given up before its rounds end",
        STREAM,
        "    if (!in->started_ns)\n        return 0;\n    if",
        "    if",
        OVERDUE,
    ),
    mutation(
        "nothing excuses a silence that is longest",
        STREAM,
        "    if (h->now - lc_later(in->last_ns, excused) > config->deadline_max_ns)",
        "    if (h->now - in->last_ns > config->deadline_max_ns)",
        OVERDUE,
    ),
    mutation(
        "a silent link that ends a stream isn't told",
        STREAM,
        "        (void)lc_find_silence(in->slot->op, in->peer, config->deadline_max_ns / 2);\n",
        "",
        OVERDUE,
    ),
    mutation(
        "a link is blamed for the silence of one stream",
        STREAM,
        "config->deadline_max_ns / 2);",
        "0);",
        OVERDUE,
    ),
    mutation(
        "that a path came back excuses nothing",
        STREAM,
        "    excused = lc_later(excused, p->back_ns);\n",
        "",
        OVERDUE,
    ),
    mutation(
        "nothing excuses that a deadline is over",
        STREAM,
        "    if (h->now - lc_later(in->started_ns, excused) <=\n",
        "    if (h->now - in->started_ns <=\n",
        OVERDUE,
    ),
    mutation(
        "gaps of the stream itself aren't looked at",
        STREAM,
        "lc_later(in->gap_ns, p->pace.measure.rtt_ns)",
        "p->pace.measure.rtt_ns",
        OVERDUE,
    ),
    mutation(
        "round trips aren't looked at, where packets are far apart",
        STREAM,
        "lc_later(in->gap_ns, p->pace.measure.rtt_ns)",
        "in->gap_ns",
        OVERDUE,
    ),
    mutation(
        "nothing excuses a gap after the deadline",
        STREAM,
        "    return h->now - lc_later(in->last_ns, excused) >\n",
        "    return h->now - in->last_ns >\n",
        OVERDUE,
    ),
    mutation(
        "an excuse counts more than a later packet",
        STREAM,
        "    return h->now - lc_later(in->last_ns, excused) >\n",
        "    return h->now - excused >\n",
        OVERDUE,
    ),
    mutation(
        "deadlines have no floor",
        STREAM,
        "config->deadline_min_ns, UINT64_MAX",
        "0, UINT64_MAX",
        OVERDUE,
    ),
    mutation(
        "what is reliable is given up",
        STREAM,
        "    if (in->slot->level->reliable)\n        return 0;\n    if (has_silent_link(in))",
        "    if (has_silent_link(in))",
        OVERDUE,
    ),
    mutation(
        "a peer that waits itself isn't excused",
        STREAM,
        "lc_later(in->excused_ns, op->group->host->awake_ns);",
        "op->group->host->awake_ns;",
        OVERDUE,
    ),
    mutation(
        "a process that was stopped blames others",
        STREAM,
        "lc_later(in->excused_ns, op->group->host->awake_ns);",
        "in->excused_ns;",
        OVERDUE,
    ),
    mutation(
        "packets of older operations are no excuse",
        STREAM,
        "    int other = p->data_order < op->order ||\n",
        "    int other = p->data_order > UINT64_MAX - 1 ||\n",
        OVERDUE,
    ),
    mutation(
        "packets of the operation's other streams are no excuse",
        STREAM,
        "p->data_slot != in->slot->desc.number);",
        "0);",
        OVERDUE,
    ),
    mutation(
        "packets of younger operations are an excuse",
        STREAM,
        "    int other = p->data_order < op->order ||\n",
        "    int other = p->data_order != op->order ||\n",
        OVERDUE,
    ),
    mutation(
        "the streams of a peer that hears nothing are waited for",
        STREAM,
        "    return found == LC_SILENT_TO || (found &&",
        "    return (found &&",
        OVERDUE,
    ),
    mutation(
        "the other streams of a silent peer are no excuse",
        STREAM,
        "    return found == LC_SILENT_TO || (found && h->now - excused_until(in) > patience);",
        "    return found;",
        OVERDUE,
    ),
)

"""The mutations, and the test that notices each. ``make mutate`` tries them.

Two that were tried are not here, since they change nothing that can be seen:

- A FIN that isn't repeated once its operation has ended (native/timers.c, tick_late_fins): the
  receiver asks for the end of a silent stream every 100 ms (ask), and the answer to that question
  for an operation that is over is FIN (native/control_in.c, on_ask). What is lost is some
  milliseconds.
- Packets of a rank that was given up are taken (native/datagrams.c, peer->dead): its streams are
  given up by then, so what comes is stale (native/stream_in.c, lc_in_take), and operations that
  begin later count it out before its first packet. What differs is a counter.
"""

from __future__ import annotations

from .model import Edit, Mutation, mutation

ENGINE = "tests/runtime/engine"
P2P = "tests/runtime/p2p/test_messages.py"
MEMBERSHIP = "tests/runtime/membership/test_root_protocol.py"

NATIVE = (
    # ---- the wire ----
    mutation(
        "checksum unchecked",
        "native/wire.c",
        "get32(src + OFFSET_CRC) == checksum(src);",
        "(get32(src + OFFSET_CRC) == checksum(src) || 1);",
        "native:test_wire",
    ),
    mutation(
        "session unchecked",
        "native/wire.c",
        "return header->session == expect->session && header->receiver",
        "return header->receiver",
        f"{ENGINE}/test_credit.py::test_a_wrong_session_is_foreign_even_from_the_right_socket",
    ),
    mutation(
        "group unchecked",
        "native/wire.c",
        "return header->count && header->group && !(header->fec",
        "return header->count && !(header->fec",
        "native:test_wire",
    ),
    mutation(
        "a count beyond the processes believed",
        "native/wire.c",
        "header->type != LC_DATA || header->count <= expect->processes;",
        "1;",
        "native:test_wire",
    ),
    # ---- seeded faults ----
    mutation(
        "bursts begin too often",
        "native/inject.c",
        "return before ? u >= end : u < begin;",
        "return before ? u >= end : u < inject->loss;",
        "native:test_inject",
    ),
    mutation(
        "rounds lose the same packets",
        "native/inject.c",
        "{group, op, slot, sender, receiver, round};",
        "{group, op, slot, sender, receiver};",
        "native:test_inject",
    ),
    # ---- messages ----
    mutation(
        "a receive takes the messages of any rank",
        "native/mailbox.c",
        "return wanted < 0 || wanted == peer;",
        "(void)wanted, (void)peer;\n    return 1;",
        "native:test_messages",
    ),
    mutation(
        "the last message of a tag is taken first",
        "native/mailbox.c",
        "lc_letter *message = lc_mail_bucket(box->held, tag)->first;\n"
        "    while (message && !(message->tag == tag && is_from(peer, message->peer)))\n"
        "        message = message->next;",
        "lc_letter *message = lc_mail_bucket(box->held, tag)->last;\n"
        "    while (message && !(message->tag == tag && is_from(peer, message->peer)))\n"
        "        message = message->prev;",
        "native:test_messages",
    ),
    mutation(
        "a small message is heard before all of it is here",
        "native/message.c",
        "if (!message || (message->eager && !message->whole) ||",
        "if (!message ||",
        "native:test_messages",
    ),
    mutation(
        "what a peer says of a message's size believed",
        "native/letter.c",
        "size == 0 || size > ELEMENT_MOST || ",
        "size == 0 || ",
        "native:test_messages",
    ),
    mutation(
        "a goodbye ends what has been received",
        "native/message.c",
        "return silent || !granted;",
        "(void)silent, (void)granted;\n    return 1;",
        "native:test_messages",
    ),
    mutation(
        "a goodbye reorders what came before it",
        "native/message.c",
        "return lost || (letter->op && !letter->whole);",
        "return lost || !letter->whole;",
        f"{P2P}::test_what_a_rank_only_announced_before_it_left_keeps_its_place",
    ),
    mutation(
        "small messages without credit",
        "native/api_messages.c",
        "lc_letter_is_small(letter) && p->used + charge <= LC_MAIL_CREDIT;",
        "lc_letter_is_small(letter);",
        f"{P2P}::test_many_small_messages_wait_at_the_sender_once_the_credit_is_used",
    ),
    mutation(
        "credit isn't given back",
        "native/message.c",
        "        p->taken += lc_letter_charge(arrival);\n",
        "",
        f"{P2P}::test_many_small_messages_wait_at_the_sender_once_the_credit_is_used",
    ),
    mutation(
        "a message may be late for ever",
        "native/message_timers.c",
        "h->now - op->submitted_ns > op->call.timeout_ns) {",
        "h->now - op->submitted_ns > UINT64_MAX / 2) {",
        f"{P2P}::test_a_timeout_names_peer_and_tag",
    ),
    mutation(
        "messages without parity",
        "native/letter.c",
        "        call->levels[0].fec = LC_MAIL_FEC;\n",
        "",
        "native:test_message_parity",
    ),
    mutation(
        "messages have parity where nothing is lost",
        "native/letter.c",
        "        call->levels[0].fec_auto = 1;\n",
        "",
        "native:test_message_parity",
    ),
    mutation(
        "messages have as little parity as collectives",
        "native/stream_out.c",
        "return code && level->reliable ? lc_fec_half(code, level->fec) : code;",
        "return code;",
        "native:test_message_parity",
    ),
    mutation(
        "a NACK of the first sending believed",
        "native/control_in.c",
        "!out->again || !r->round || ",
        "!out->again || ",
        "native:test_sim",
    ),
    # ---- callers that wait ----
    mutation(
        "a caller that waits never sleeps",
        "native/loop.c",
        "    if (!until || !longest_ns)\n",
        "    if (1)\n",
        "native:test_wait",
    ),
    mutation(
        "a caller sleeps beyond its timers",
        "native/loop.c",
        "begin_sleep(h, &sleep, until < longest_ns ? until : longest_ns);",
        "begin_sleep(h, &sleep, longest_ns);",
        "native:test_wait",
    ),
    mutation(
        "a caller sleeps though something is wanted of it",
        "native/loop.c",
        "    if (!is_wanted(h))\n        lc_waiter_sleep(&h->caller_waiter",
        "    if (1)\n        lc_waiter_sleep(&h->caller_waiter",
        "native:test_wait",
    ),
    mutation(
        "who wants something of a caller that sleeps wakes the thread",
        "native/loop.c",
        "    if (atomic_load(&h->caller_sleeps))\n",
        "    if (0)\n",
        "native:test_wait",
    ),
    mutation(
        "callers look again where others want the core",
        "native/loop.c",
        "        h->crowded_ns = now;\n",
        "        (void)now;\n",
        "native:test_wait",
    ),
    mutation(
        "a name that is asked for before the end isn't told",
        "native/api.c",
        "    op->call.notify = 1;\n",
        "",
        "native:test_wait",
    ),
    mutation(
        "a name that is asked for after the end isn't told",
        "native/api.c",
        "    if (op->finished)\n        lc_name_finished(op);\n",
        "",
        "native:test_wait",
    ),
    # ---- lingering ----
    mutation(
        "what lingers is sent from the caller's memory",
        "native/linger.c",
        "    s->value = to;\n",
        "",
        "native:test_linger",
    ),
    mutation(
        "packets that wait are told apart without their groups",
        "native/cells.c",
        "last && last->group == h->group && ",
        "last && ",
        "native:test_sim",
    ),
    mutation(
        "an operation ends while a link reads its memory",
        "native/operations.c",
        "!op->reporting && !op->runs;",
        "!op->reporting;",
        "native:test_interfaces",
    ),
    mutation(
        "a group fails while a link reads its memory",
        "native/operations.c",
        "        if (g->runs)\n",
        "        if (0)\n",
        "native:test_interfaces",
    ),
    mutation(
        "a quiet link is asked in each turn",
        "native/datagrams.c",
        "if (quiet && ++via->unasked < TURNS_UNASKED)",
        "if (quiet && ++via->unasked < 1)",
        "native:test_interfaces",
    ),
    mutation(
        "who leaves packets that wait for their link wakes nobody",
        "native/loop.c",
        "        sent &= !lc_is_blocked(&h->interfaces[i]);\n",
        "",
        "native:test_interfaces",
    ),
    mutation(
        "who leaves a call that runs wakes nobody",
        "native/loop.c",
        "return sent && h->collectives == h->lingering && !h->queued;",
        "return sent && !h->queued;",
        "native:test_interfaces",
    ),
    mutation(
        "that a peer has failed of another rank's call ends nothing",
        "native/control_in.c",
        "else if (now - p->failed_ns > FAILED_NS)",
        "else if (0)",
        "native:test_sim",
    ),
    mutation(
        "a stream isn't resumed when its receiver is heard again",
        "native/timers.c",
        "    lc_out_resume(out);\n",
        "",
        "native:test_sim",
    ),
    mutation(
        "few groups that were closed are remembered",
        "native/state.h",
        "LC_GONE = 4096, ",
        "LC_GONE = 256, ",
        "native:test_interfaces",
    ),
    mutation(
        "a link that is full is asked all the time after it had failed",
        "native/link_udp.c",
        "if (blocked && lc_backoff_holds(&u->failing, now)) {",
        "if (blocked && u->failing.until_ns) {",
        "native:test_link",
    ),
    mutation(
        "lingering operations without bound",
        "native/linger.c",
        "lc_lingering(g, NULL) < LC_LINGERING &&",
        "lc_lingering(g, NULL) < LC_LINGERING * 4 &&",
        "native:test_linger",
    ),
    mutation(
        "what is owed to members that have left lingers",
        "native/operations.c",
        "if (g->table[i] && g->table[i]->lingers)",
        "if (g->table[i] && !g->table[i]->lingers)",
        "native:test_linger",
    ),
    mutation(
        "what is sent after the report isn't counted",
        "native/operations.c",
        "    add_rest(&g->live, &op->report, &op->told);\n",
        "",
        "native:test_linger",
    ),
    mutation(
        "what lacks something lingers",
        "native/operations.c",
        "!op->reporting && !op->report.packets_missing && ",
        "!op->reporting && ",
        "native:test_sim",
    ),
    mutation(
        "who waits for the end of a stream hears of it later",
        "native/stream_in.c",
        "tell_done(in, op->peers[in->peer].patient);",
        "tell_done(in, 1);",
        "native:test_linger",
    ),
    mutation(
        "an end that was put off is never told",
        "native/stream_out.c",
        "    out->fin_ns = out->sent_ns + LC_FIN_AGAIN_NS;\n",
        "    out->fin_ns = UINT64_MAX;\n",
        "native:test_linger",
    ),
    # ---- two packets in a datagram ----
    mutation(
        "control rides in no datagram of data",
        "native/stream_out.c",
        "    if (out->round || s->n_ready - out->cursor != 1)",
        "    if (out->round || s->n_ready - out->cursor != 0)",
        "native:test_small",
    ),
    mutation(
        "what follows a control packet isn't looked at",
        "native/datagrams.c",
        "    if (first < n)",
        "    if (first > n)",
        "native:test_small",
    ),
    # ---- sums and counts ----
    mutation(
        "own contribution not counted",
        "native/combine.c",
        "uint32_t weight = s->count[k] + p.own_weight, most",
        "uint32_t weight = s->count[k], most",
        "native:test_engine",
    ),
    mutation(
        "a partial sum counts as one contribution",
        "native/combine.c",
        "s->count[k] = (uint16_t)(s->count[k] + h->count);",
        "s->count[k] = (uint16_t)(s->count[k] + 1);",
        "native:test_engine",
    ),
    mutation(
        "a packet that came twice is added twice",
        "native/stream_in.c",
        "} else if (lc_bit(in->arrived, header->packet)) {\n        g->live.repeated++;",
        "} else if (0) {\n        g->live.repeated++;",
        "native:test_engine",
    ),
    mutation(
        "a stratified mean forgets how many arrived",
        "native/combine.c",
        "scale * sources / (full * others), p.n);\n    } else if (others > 0) {",
        "scale / full, p.n);\n    } else if (others > 0) {",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "what is missing is not made zero",
        "native/combine.c",
        "        memset(p.value, 0, (size_t)p.n * op->element_bytes);",
        "        (void)p.n;",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "weights of a first contribution ignored",
        "native/combine.c",
        "op->codec.first_weighted(&op->codec, p.acc, own, payload, op->weights[peer], p.n);",
        "op->codec.first(&op->codec, p.acc, own, payload, p.n);",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "owners keep the exact mean of what they send encoded",
        "native/payload.c",
        "if (s->desc.target == LC_TARGET_OUT)",
        "if (0)",
        f"{ENGINE}/test_encodings.py::test_replicas_are_equal_and_packets_half_as_many",
    ),
    mutation(
        "packets of another encoding believed",
        "native/stream_in.c",
        "h->encoding != s->op->call.encoding ||",
        "",
        f"{ENGINE}/test_hostile_network.py::test_fields_out_of_range_from_the_right_address",
    ),
    mutation(
        "bf16 rounded down",
        "native/kernels_target.h",
        "VU32 rounded = bits + 0x7FFFu + ((bits >> 16) & 1);",
        "VU32 rounded = bits;",
        "native:test_kernels",
    ),
    mutation(
        "what a slot is fed late not added",
        "native/combine.c",
        "s->op->codec.sums->add(p.acc, p.own, p.n);",
        "(void)p.acc;",
        "native:test_sim",
    ),
    # ---- repair, parity ----
    mutation(
        "what finds no room in the list of records never told",
        "native/control_out.c",
        "if (p->n_records >= LC_RECORDS - LC_RECORDS / 8) {",
        "if (p->n_records > LC_RECORDS) {",
        "native:test_long",
    ),
    mutation(
        "one repair too few",
        "native/stream_in.c",
        "if (!level->reliable && in->round >= level->repair) {",
        "if (!level->reliable && in->round + 1 >= level->repair) {",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "only the first 128 packets asked for again",
        "native/control_out.c",
        "for (uint32_t base = first + 128; base < s->n_packets; base += 128) {",
        "for (uint32_t base = first + 128; base < 0; base += 128) {",
        f"{ENGINE}/test_oracle.py::test_senders_learn_what_was_given_up[2-0-loss=0.5,seed=14]",
    ),
    mutation(
        "a needed packet given up",
        "native/stream_in.c",
        "if (!lacks || lc_overdue(in)) {",
        "if (1) {",
        f"{ENGINE}/test_oracle.py::test_needed_packets_come_and_no_others[2-0]",
    ),
    mutation(
        "parity without the last bytes",
        "native/fec.c",
        "    for (; i < n; i++)\n        into[i] ^= from[i];",
        "    (void)i;",
        "native:test_fec",
    ),
    mutation(
        "half the parity that a loss asks for",
        "native/fec.c",
        "double want = LOG_KEPT / loss;",
        "double want = 2 * LOG_KEPT / loss;",
        "native:test_fec",
    ),
    mutation(
        "parity of a set that lacks two",
        "native/stream_in.c",
        "if (p->left[set] != 1 || !lc_bit(p->came, set))",
        "if (!p->left[set] || !lc_bit(p->came, set))",
        "native:test_engine",
    ),
    # ---- windows and rates ----
    mutation(
        "credit of lost packets kept",
        "native/state.c",
        "    p->rx_next = next;\n",
        "    p->rx_next++;\n",
        f"{ENGINE}/test_credit.py::test_credit_comes_back_after_loss",
    ),
    Mutation(
        "PROBE and FIN return no credit",
        (
            Edit("native/control_in.c", "lc_link_seen(p, r.a);", "(void)p;"),
            Edit("native/control_in.c", "    lc_link_seen(p, r->b);\n", ""),
        ),
        f"{ENGINE}/test_credit.py::test_credit_comes_back_after_an_outage",
    ),
    mutation(
        "four times the packets that fit a buffer",
        "native/link_udp.c",
        "return (uint32_t)(buffer * 8 / 10 / charge);",
        "return (uint32_t)(buffer * 32 / 10 / charge);",
        f"{ENGINE}/test_lossless.py::test_nothing_is_lost_in_small_buffers",
    ),
    mutation(
        "sent ahead without bound",
        "native/stream_out.c",
        "return used < most ? most - used : 0;",
        "return most + 0 * used;",
        f"{ENGINE}/test_lossless.py::test_no_more_is_sent_ahead_than_there_is_room_for",
    ),
    mutation(
        "heavy loss cuts no rate",
        "native/pace.c",
        "if (lost > LOST_MIN && lost > LOSS_TOLERANCE * pace->moved)",
        "if (lost > LOST_MIN && lost > pace->moved)",
        "native:test_pace",
    ),
    mutation(
        "a fixed rate is exceeded by half",
        "native/rate.c",
        "rate->tokens -= (double)packets * packet_bytes;",
        "rate->tokens -= 0.66 * packets * packet_bytes;",
        f"{ENGINE}/test_reports.py::test_a_fixed_rate_is_kept",
    ),
    # ---- several links ----
    mutation(
        "packets believed that come by another link",
        "native/datagrams.c",
        "return h->paths[sender].interface == via && lc_link_is_from(",
        "return lc_link_is_from(",
        "native:test_interfaces",
    ),
    mutation(
        "a full link stops the others",
        "native/stream_out.c",
        "any |= send_by(h, &h->interfaces[",
        "any |= !lc_is_blocked(h->interfaces) && send_by(h, &h->interfaces[",
        "native:test_interfaces",
    ),
    mutation(
        "who waits for a full link doesn't rest",
        "native/loop.c",
        "if (!p->outs || lc_is_blocked(p->interface) ||",
        "if (!p->outs ||",
        "native:test_interfaces",
    ),
    mutation(
        "a link that fails for good ends groups that don't use it",
        "native/batch.c",
        "        if (lc_group_uses(g, via))\n            lc_fail(g, &via->failed);",
        "        lc_fail(g, &via->failed);",
        "native:test_interfaces",
    ),
    mutation(
        "groups opened on a link that has failed",
        "native/loop.c",
        "if (h->interfaces[i].failed.code && lc_group_uses(g, &h->interfaces[i]))",
        "if (0)",
        "native:test_interfaces",
    ),
    mutation(
        "a link that carries no packet of the host taken",
        "native/host.c",
        "if (bytes <= link->packet_max)",
        "if (link->packet_max)",
        "native:test_interfaces",
    ),
    mutation(
        "a length in shared memory unchecked",
        "native/link_shm_move.c",
        "!bytes || bytes > LC_SHM_HEAD_MAX || rest > LC_SHARED_PAYLOAD ||",
        "!bytes || bytes > LC_SHM_HEAD_MAX ||",
        "native:test_link_shm",
    ),
    mutation(
        "what a peer has taken of shared memory unchecked",
        "native/link_shm_move.c",
        "if (taken - p->freed > p->sent - p->freed) {",
        "if (taken == p->sent + 7) {",
        "native:test_link_shm",
    ),
    mutation(
        "small packets take as much of the window as large ones",
        "native/state.h",
        "return packet_bytes <= via->small_max ? 1 : via->large_units;",
        "return packet_bytes ? via->large_units : 1;",
        "native:test_shared_window",
    ),
    mutation(
        "large packets take as little of the window as small ones",
        "native/host.c",
        "via->large_units = (via->window + large - 1) / large;",
        "via->large_units = 1;",
        "native:test_shared_window",
    ),
    mutation(
        "units of the window that nobody is told of",
        "native/stream_in.c",
        " || p->rx_units >= most ||",
        " ||",
        "native:test_shared_window",
    ),
    mutation(
        "a nap without another look",
        "native/link_shm_move.c",
        "return has_come(s);",
        "return 0 && has_come(s);",
        "native:test_link_shm",
    ),
    mutation(
        "a payload for two given back by the first",
        "native/link_shm_move.c",
        "if (--b->users == 0)",
        "if (--b->users < 2)",
        "native:test_link_shm",
    ),
    mutation(
        "a copy of its own for a late receiver",
        "native/link_shm_move.c",
        "b->to_serve ? s->buffer[s->n_buffers].prev : s->n_buffers",
        "s->n_buffers",
        "native:test_link_shm",
    ),
    mutation(
        "memory that can shrink accepted",
        "native/link_shm.c",
        "return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat",
        "return seals >= 0 && fstat",
        "native:test_link_shm",
    ),
    mutation(
        "packets that a link doesn't carry submitted",
        "native/api.c",
        "if (!fits_links(op)) {",
        "if (0 && !fits_links(op)) {",
        f"{ENGINE}/test_shared_memory.py::test_packets_that_a_link_does_not_carry_are_refused",
    ),
    mutation(
        "the number of a process's link unchecked",
        "native/host.c",
        "if (address->link >= h->n_interfaces)",
        "if (address->link >= LC_LINKS)",
        "native:test_interfaces",
    ),
    mutation(
        "the first link takes all of a fixed rate",
        "native/stream_out.c",
        "    h->turn = (uint16_t)((h->turn + 1) % h->n_interfaces);\n",
        "",
        "native:test_interfaces",
    ),
    mutation(
        "only the last link wakes who sleeps",
        "native/waiter.c",
        "sleep->n_fds += lc_link_descriptors(",
        "sleep->n_fds = 1 + lc_link_descriptors(",
        "native:test_interfaces",
    ),
    mutation(
        "events don't say of which link they are",
        "native/loop.c",
        "            event.link = i;\n",
        "",
        "native:test_interfaces",
    ),
    mutation(
        "an operation that ends hands over the one before as well",
        "native/state.c",
        "    op->next = NULL;\n    *(g->done_last",
        "    *(g->done_last",
        "native:test_sim",
    ),
    # ---- time ----
    mutation(
        "a rank that waits is not waited for",
        "native/control_in.c",
        "        in->excused_ns = g->host->now;",
        "        (void)g;",
        f"{ENGINE}/test_waiting.py::test_streams_behind_a_pause_lose_nothing",
    ),
    mutation(
        "deadlines never end",
        "native/timers.c",
        "if (lc_overdue(in)) {\n            lc_give_up",
        "if (0) {\n            lc_give_up",
        f"{ENGINE}/test_ends.py::test_a_silent_path_ends_at_the_deadline",
    ),
    mutation(
        "timeouts doubled",
        "native/timers.c",
        "h->now - op->submitted_ns > op->call.timeout_ns) {",
        "h->now - op->submitted_ns > 2 * op->call.timeout_ns) {",
        f"{ENGINE}/test_ends.py::test_a_rank_that_never_submits_is_named",
    ),
    # ---- agreement ----
    mutation(
        "another collective taken for the same",
        "native/control_in.c",
        "return r->c == op->call.signature && r->a == op->call.dtype;",
        "return r->a == op->call.dtype;",
        f"{ENGINE}/test_ends.py::test_mismatch_is_reported_at_once_on_every_rank",
    ),
)

PYTHON = (
    # ---- plans ----
    mutation(
        "orders that aren't equally frequent",
        "lossycoll/plan/order.py",
        "j = (mix(key ^ i) * (i + 1)) >> 64",
        "j = (mix(key ^ i) * i) >> 64",
        "tests/plan/test_builders.py::test_orders_are_equally_frequent",
    ),
    mutation(
        "one order for all operations",
        "lossycoll/plan/order.py",
        "key = mix(mix(mix((seed ^ DOMAIN) & MASK) ^ group) ^ op)",
        "key = mix(mix(mix((seed ^ DOMAIN) & MASK) ^ group))",
        "tests/plan/test_builders.py::test_order_depends_on_everything",
    ),
    mutation(
        "sizes are not in the signature",
        "lossycoll/plan/signature.py",
        "            parts.append(str(int(field)))",
        '            parts.append("0")',
        "tests/plan/test_builders.py::test_signature_differs_when_anything_differs",
    ),
    mutation(
        "the reference repairs two of a set",
        "lossycoll/plan/parity.py",
        "one_missing = np.bincount(of_set, missing, len(came)) == 1",
        "one_missing = np.bincount(of_set, missing, len(came)) >= 1",
        f"{ENGINE}/test_parity.py::test_what_comes_back",
    ),
    mutation(
        "a relayed plan is kept when ranks are lost",
        "lossycoll/runtime/collectives/plan_cache.py",
        "return found if members.complete or found.direct else",
        "return found if found else",
        "tests/runtime/collectives/test_plan_cache.py"
        "::test_only_direct_plans_are_kept_when_ranks_are_lost",
    ),
    mutation(
        "owners are drawn by host, not by rank",
        "lossycoll/plan/shares.py",
        "for rank in part.ranks[::step]}",
        "for rank in part.ranks[:1]}",
        "tests/plan/test_hierarchical.py::test_each_rank_has_its_share_of_a_mean[0.6-aaabb-xxxxx]",
    ),
    mutation(
        "packets are lost between hosts of a site",
        "lossycoll/plan/tiers.py",
        "lowest = _grouped(lowest, topology.members_of_sites)\n        tops.append(lowest)\n"
        "        levels.append(small)",
        "lowest = _grouped(lowest, topology.members_of_sites)\n        tops.append(lowest)\n"
        "        levels.append(Level(elements_per_packet))",
        "tests/plan/test_hierarchical.py::test_the_ranks_of_a_host_miss_the_same"
        "[all_gather-aabbccdd-xxxxyyyy]",
    ),
    mutation(
        "a stratum of a host counts one",
        "native/combine.c",
        "scale / p.own_weight, NULL, 0, p.n);",
        "scale, NULL, 0, p.n);",
        f"{ENGINE}/test_hierarchical.py::test_engine_equals_reference[hosts-loss=0.4,seed=7]",
    ),
    mutation(
        "a ring of one forms no mean",
        "lossycoll/plan/ring.py",
        "serves=lambda world: world > 1,",
        "serves=lambda world: world > 0,",
        "tests/plan/test_registry.py::test_what_a_call_uses",
    ),
    # ---- how a mean is formed ----
    mutation(
        "a rate believed after few packets",
        "lossycoll/runtime/collectives/estimators.py",
        "return self.delivered / self.offered if self.known >= ENOUGH else None",
        "return self.delivered / self.offered if self.known >= 10 else None",
        "tests/runtime/collectives/test_estimators.py::test_what_is_unknown_is_not_guessed",
    ),
    mutation(
        "weights without a bound",
        "lossycoll/runtime/collectives/estimators.py",
        "if rate is not None and (rate < LEAST_RATE or self.silent >= ENOUGH):",
        "if rate is not None and self.silent >= ENOUGH:",
        "tests/runtime/collectives/test_estimators.py::test_no_weight_is_without_bound",
    ),
    mutation(
        "the owners of all operations are the same",
        "lossycoll/runtime/collectives/plan_cache.py",
        "return draw_order(options.seed, group, op & 0xFFFFFFFF, len(members.ranks))",
        "return draw_order(options.seed, group, 0, len(members.ranks))",
        "tests/runtime/collectives/test_plan_cache.py"
        "::test_the_order_is_drawn_for_lossy_calls_of_those_that_want_it",
    ),
    mutation(
        'on_missing="zero" keeps',
        "lossycoll/runtime/collectives/endpoint.py",
        "missing = Missing[options.on_missing.upper()]",
        'missing = Missing["KEEP" if options.on_missing == "zero" else options.on_missing.upper()]',
        "tests/runtime/collectives/test_missing.py"
        "::test_what_is_missing_is_filled_as_the_option_says",
    ),
    # ---- options, membership ----
    mutation(
        "an option that ranks don't compare",
        "lossycoll/options/fields.py",
        "if row(entry).agree}",
        'if row(entry).agree and entry.name != "repair"}',
        "tests/runtime/membership/test_compared.py"
        "::test_the_options_that_ranks_compare_are_those_that_the_table_marks",
    ),
    mutation(
        "a rank that can't make its group keeps silent",
        "lossycoll/backend/group_steps.py",
        "    undo.push(tell)",
        "    del tell",
        "tests/backend/test_group_steps.py"
        "::test_a_rank_that_fails_after_the_meeting_is_heard_by_all",
    ),
    mutation(
        "groups that ranks define differently work",
        "native/api.c",
        "    op->call.signature ^= g->config.definition;\n",
        "",
        "tests/backend/test_connected.py"
        "::test_ranks_that_differ_in_a_group_are_named_by_its_first_call_on_all",
    ),
    mutation(
        "who hears another definition of a group keeps silent",
        "lossycoll/runtime/membership/membership.py",
        "            self._define(root)\n        elif",
        "            pass\n        elif",
        "tests/backend/test_connected.py"
        "::test_ranks_that_differ_in_a_group_are_named_by_its_first_call_on_all",
    ),
    mutation(
        "two groups of one name have one number",
        "lossycoll/backend/connected.py",
        'f"{root.session}/{ROOTS.use(root, name)}/{name}"',
        'f"{root.session}/{name}"',
        "tests/backend/test_connected.py"
        "::test_groups_are_made_without_the_store_in_any_number_order_and_time",
    ),
    mutation(
        "liveness doubled in the group",
        "lossycoll/backend/group_steps.py",
        "plane = ControlPlane(place.rank, place.size, mine.options.liveness)",
        "plane = ControlPlane(place.rank, place.size, 2 * mine.options.liveness)",
        "tests/backend/test_liveness.py::test_the_group_hands_its_liveness_on",
    ),
    mutation(
        "memory of who doesn't know the token is believed",
        "lossycoll/runtime/net/descriptor_exchange.py",
        "or not secrets.compare_digest(theirs.encode(), token.encode())",
        "",
        "tests/runtime/net/test_descriptor_exchange.py::test_another_token_isnt_believed",
    ),
    mutation(
        "memory that may shrink is believed",
        "lossycoll/runtime/net/descriptor_exchange.py",
        "if seals & SEALS != SEALS or",
        "if",
        "tests/runtime/net/test_descriptor_exchange.py"
        "::test_memory_that_isnt_safe_to_read_is_refused",
    ),
    mutation(
        "a rank counts to a host that lacks its memory",
        "lossycoll/backend/sharing.py",
        "other in has[rank] and rank in has[other]",
        "other in has[rank]",
        "tests/backend/test_sharing.py::test_hosts_are_cliques_whatever_failed",
    ),
    mutation(
        "hosts that are far apart are one learnt site",
        "lossycoll/plan/sites.py",
        "if seconds > near and of_hosts[a] == of_hosts[b]:",
        "if False:",
        "tests/plan/test_sites.py::test_why_there_is_one_site",
    ),
    mutation(
        "learnt sites between which nothing is known",
        "lossycoll/plan/sites.py",
        "if (one, other) not in between:",
        "if False:",
        "tests/plan/test_sites.py::test_what_is_missing_never_divides_otherwise",
    ),
    mutation(
        "halls of a campus are two learnt sites",
        "lossycoll/plan/sites.py",
        "if b >= max(FAR, RATIO * a)]",
        "if b >= RATIO * a]",
        "tests/plan/test_sites.py::test_why_there_is_one_site",
    ),
    mutation(
        "the slowest try tells the round trip",
        "lossycoll/runtime/net/round_trips.py",
        "best[number] = min(taken, best.get(number, math.inf))",
        "best[number] = max(taken, best.get(number, 0.0))",
        "tests/runtime/net/test_round_trips.py::test_the_quickest_try_counts",
    ),
    mutation(
        "silence counted for twice as long",
        "lossycoll/runtime/membership/failure_detector.py",
        "self.silence = liveness * SILENT_SHARE",
        "self.silence = 2 * liveness * SILENT_SHARE",
        f"{MEMBERSHIP}::test_silence_is_death_within_the_liveness_and_not_long_before",
    ),
    mutation(
        "a rank that slept accuses the others",
        "lossycoll/runtime/membership/failure_detector.py",
        "                self._heard[rank] = min(now, at + late)",
        "                pass",
        f"{MEMBERSHIP}::test_ranks_that_slept_themselves_accuse_nobody",
    ),
    mutation(
        "what is said once isn't repeated to the next hub",
        "lossycoll/runtime/membership/root_protocol.py",
        "for repeated in [*self._repeats.of(self.rank, self._clock()), *waiting]:",
        "for repeated in waiting:",
        "tests/runtime/membership/test_failover.py"
        "::test_what_is_said_while_the_hub_dies_is_said_again",
    ),
    mutation(
        "a death after a goodbye is a loss",
        "lossycoll/runtime/membership/membership.py",
        "        elif rank in self._gone:\n            return\n",
        "",
        "tests/runtime/membership/test_membership.py"
        "::test_a_rank_that_left_one_group_is_watched_for_the_others",
    ),
    mutation(
        "both halves of a network go on",
        "lossycoll/runtime/membership/view_agreement.py",
        "(2 * here == len(rest) and rest[0] in self.left)",
        "2 * here == len(rest)",
        f"{MEMBERSHIP}::test_a_half_with_the_lowest_rank_goes_on",
    ),
    mutation(
        "a forked child keeps the control plane's sockets",
        "lossycoll/runtime/membership/control_plane.py",
        "        plane._sockets.abandon()\n",
        "",
        "tests/backend/test_roots.py"
        "::test_a_killed_rank_is_noticed_at_once_though_its_forked_child_lives",
    ),
    # ---- training ----
    mutation(
        "a block a step too old",
        "lossycoll/train/common/staleness.py",
        "mask: Mask = self.values >= self._max_age",
        "mask: Mask = self.values > self._max_age",
        "tests/train/common/test_staleness.py::test_ages_count_steps_since_a_block_came",
    ),
    mutation(
        "a late rank begins another micro-batch",
        "lossycoll/train/dropcompute/loop.py",
        "late = self._watch.elapsed > self._threshold",
        "late = self._watch.elapsed > 2 * self._threshold",
        "tests/train/dropcompute/test_loop.py::test_no_micro_batch_begins_after_the_threshold",
    ),
    mutation(
        "lost rows are forgotten",
        "lossycoll/train/compress/error_memory.py",
        'self.tensors["error"].index_add_(0, delivered.index, delivered.values, alpha=-1)',
        'self.tensors["error"].index_fill_(0, delivered.index, 0.0)',
        "tests/train/compress/test_error_memory.py::test_nothing_is_forgotten",
    ),
    mutation(
        "dropped micro-batches count",
        "lossycoll/train/dropcompute/runner.py",
        "return self._settings.micro_batches * ranks / completed",
        "return 1.0",
        "tests/train/dropcompute/test_controller.py::test_the_mean_is_over_what_was_completed",
    ),
)

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

MUTATIONS = NATIVE + PYTHON + LABORATORY

"""Messages from rank to rank."""

from __future__ import annotations

from .model import LOSSY_P2P, P2P, mutation

MESSAGES = (
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
        "size >= 1 && size <= ELEMENT_MOST &&",
        "size >= 1 &&",
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
        "        call->levels[0].choose = LC_CHOOSE_PARITY;\n",
        "",
        "native:test_message_parity",
    ),
    mutation(
        "messages have parity where nothing is lost",
        "native/letter.c",
        "        call->levels[0].choose = LC_CHOOSE_PARITY;\n",
        "        call->levels[0].code = lc_code(4, 1);\n",
        "native:test_message_parity",
    ),
    mutation(
        "messages have as little parity as collectives",
        "native/choice.c",
        "return level->reliable ? (float)(1 / (RARELY * s->n_packets)) : level->max_missing;",
        "return s->n_packets + RARELY < 0 ? 0 : level->max_missing;",
        "native:test_message_parity",
    ),
    mutation(
        "a NACK of the first sending believed",
        "native/control_in.c",
        "!out->again || !r->round || ",
        "!out->again || ",
        "native:test_sim",
    ),
    mutation(
        "a message is lossy though its receiver doesn't ask for it",
        "native/message.c",
        "if (receive->lossy && message->lossy)",
        "if (message->lossy)",
        "native:test_sim",
    ),
    mutation(
        "a message is lossy though its sender doesn't ask for it",
        "native/message.c",
        "if (receive->lossy && message->lossy)",
        "if (receive->lossy)",
        "native:test_sim",
    ),
    mutation(
        "lossy messages aren't",
        "native/message.c",
        "if (receive->lossy && message->lossy)",
        "if (receive->lossy && 0)",
        f"{LOSSY_P2P}::test_a_message_loses_packets_where_both_ends_ask_for_it_and_nowhere_else",
    ),
    mutation(
        "what a lossy message lacks is never zeroed",
        "native/message.c",
        "        lc_fill_missing(op);\n",
        "        (void)0;\n",
        "native:test_sim",
    ),
    mutation(
        "a lossy message is resent once more than it may be",
        "native/letter.c",
        "receive->repair : message->repair;",
        "receive->repair : message->repair + 1;",
        "native:test_sim",
    ),
    mutation(
        "small messages may be announced as lossy",
        "native/letter.c",
        "return lc_letter_is_small(letter) ? !letter->lossy : !letter->eager;",
        "return lc_letter_is_small(letter) || !letter->eager;",
        "native:test_messages",
    ),
    mutation(
        "marks of a message that mean nothing are taken",
        "native/letter.c",
        "(marks == LOSSY ||",
        "(marks >= LOSSY ||",
        "native:test_messages",
    ),
    mutation(
        "what messages lack isn't counted",
        "native/letter_state.c",
        "    g->live.packets_missing += op->report.packets_missing;\n",
        "",
        f"{LOSSY_P2P}::test_a_message_loses_packets_where_both_ends_ask_for_it_and_nowhere_else",
    ),
)

"""Defects of parity: sets, the field, the code, the choice of means."""

from __future__ import annotations

from .model import Mutation, mutation

PARITY: tuple[Mutation, ...] = (
    mutation(
        "neighbours in one set",
        "native/sets.c",
        "return (lc_place){window, window * s->each + i % sets, i / sets};",
        "return (lc_place){window, window * s->each + i / s->k + 0 * sets, i % s->k};",
        "native:test_sets",
    ),
    mutation(
        "a last window's sets as many as the others'",
        "native/sets.c",
        "return window + 1 < s->windows ? s->each : up(lc_shape_packets(s, window), s->k);",
        "return s->each + 0 * window;",
        "native:test_sets",
    ),
    mutation(
        "what lossy streams resend counts as reliable",
        "native/stream_out.c",
        "        if (out->slot->level->reliable)\n            r->resent_reliable",
        "        if (out->slot->level)\n            r->resent_reliable",
        "tests/train/test_rounds.py::test_rounds_are_counted_apart_from_reliable_calls",
    ),
    mutation(
        "codes beyond the field believed",
        "native/sets.c",
        "return code < 1u << 10 && lc_code_k(code) + lc_code_m(code) <= LC_SYMBOLS_MOST;",
        "return code < 1u << 10;",
        "native:test_sets",
    ),
    mutation(
        "the polynomial of another field",
        "native/gf.c",
        "POLYNOMIAL = 0x11D",
        "POLYNOMIAL = 0x12B",
        "native:test_gf",
    ),
    mutation(
        "the last bytes counted twice",
        "native/gf_target.h",
        "SPLIT_OF(NAME(load)(from + at) & kept)",
        "SPLIT_OF(NAME(load)(from + at) | (kept & 0))",
        "native:test_gf",
    ),
    mutation(
        "counts not multiplied",
        "native/rs.c",
        "rows->counts[row] ^= times_count(chosen[i], count);",
        "rows->counts[row] ^= count;",
        "native:test_rs",
    ),
    mutation(
        "a factor of the next column",
        "native/rs.c",
        "return (uint8_t)(255 - column);",
        "return (uint8_t)(254 - column);",
        "native:test_rs",
    ),
    mutation(
        "points that stand twice believed",
        "native/rs.c",
        "if (!of_row[i] || !of_column[i])",
        "if (e == 0)",
        "native:test_rs",
    ),
    mutation(
        "bursts taken for single losses",
        "native/recovery.c",
        "kept *= correlation;",
        "kept *= correlation * correlation;",
        "tests/runtime/engine/test_recovery.py::test_what_is_left_is_that_of_python",
    ),
    mutation(
        "a choice that wavers with its estimate",
        "native/recovery.c",
        "return found->recovery.expected >= s->wanted * KEEP_LEAST &&",
        "return 0 && found->recovery.expected >= s->wanted * KEEP_LEAST &&",
        "native:test_recovery",
    ),
    mutation(
        "more parity than there is room for",
        "native/recovery.c",
        "return parity <= s->cap * s->n * (1 + 1e-9);",
        "return parity <= (s->cap + 0.1) * s->n;",
        "native:test_recovery",
    ),
    mutation(
        "a path that loses nothing, whatever is measured",
        "native/recovery_choice.c",
        ".loss = loss_to(p),",
        ".loss = 0 * loss_to(p),",
        "native:test_dial",
    ),
    mutation(
        "a choice for one stream taken for another's",
        "native/recovery.c",
        "return a->packets == b->packets && a->packet_bytes",
        "return a->packet_bytes",
        "native:test_recovery",
    ),
)

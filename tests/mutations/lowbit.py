"""Float32 in a few bits: grids, planes, spikes."""

from __future__ import annotations

from .model import mutation

CODEC = "tests/plan/test_codec.py"

LOWBIT = (
    mutation(
        "indices are cut off, not rounded",
        "native/lowbit_target.h",
        "(VU32)(t + ROUNDER) & 255u",
        "(VU32)(t - 0.5f + ROUNDER) & 255u",
        "native:test_lowbit",
    ),
    mutation(
        "the last index may be farther from zero than the anchor",
        "native/lowbit.c",
        "    return wanted < most ? wanted : most;\n",
        "    (void)most;\n    return wanted;\n",
        "native:test_lowbit",
    ),
    mutation(
        "the ends of a group are rounded at random as well",
        "native/lowbit_target.h",
        "(~(is_last | is_first) & (VU32)t)",
        "(~is_last & (VU32)t)",
        "native:test_lowbit",
    ),
    mutation(
        "what is drawn is not even",
        "native/lowbit_target.h",
        "whole * DRAW_UNIT + DRAW_LEAST",
        "whole * DRAW_UNIT - 0.25f",
        "native:test_lowbit",
    ),
    mutation(
        "every operation draws the same",
        "native/api.c",
        "{g->config.fault_group, op->number,",
        "{g->config.fault_group, 0,",
        "tests/runtime/engine/test_encodings.py::test_reliable_delivers_everything_encoded",
    ),
    mutation(
        "nothing is held between the spikes",
        "native/lowbit.c",
        "        x = x < low ? low : x;\n        x = x > high ? high : x;\n",
        "",
        "native:test_lowbit",
    ),
    mutation(
        "a spike's place is believed",
        "native/lowbit.c",
        "    if (i < n) /* a place beyond the group is nobody's */\n",
        "    (void)n;\n",
        "native:test_lowbit",
    ),
    mutation(
        "an infinity is an element like others",
        "native/lowbit.c",
        "    if (r.special)\n        return constant_header",
        "    if (0)\n        return constant_header",
        f"{CODEC}::test_c_and_numpy_encode_alike",
    ),
    mutation(
        "packets cut groups",
        "native/codec.c",
        "return group && fit > group ? fit - fit % group : fit;",
        "return group ? fit : fit;",
        f"{CODEC}::test_c_and_numpy_fill_packets_alike",
    ),
    mutation(
        "groups that became NaN aren't counted",
        "native/payload.c",
        "s->op->report.nan_groups += c->encode",
        "(void)c->encode",
        "tests/backend/test_encodings.py::test_groups_that_are_not_finite_are_nan_and_counted",
    ),
    mutation(
        "who only contributes to a reduction is written to",
        "lossycoll/backend/dispatch.py",
        "fills = not gathers or call.root in (None, self.where.rank)",
        "fills = True",
        "tests/backend/test_encodings.py::test_who_only_contributes_keeps_what_it_has",
    ),
    mutation(
        "what is added up within a host is encoded",
        "lossycoll/runtime/engine/binding.py",
        "c.levels[i].plain = level.plain",
        "c.levels[i].plain = False",
        "tests/runtime/engine/test_hierarchical.py::test_sums_within_a_host_travel_as_they_are",
    ),
    mutation(
        "what leaves no host is encoded",
        "lossycoll/backend/dispatch.py",
        "and self.endpoint.topology.one_host:",
        "and not self.endpoint:",
        "tests/backend/test_encodings.py::test_what_is_added_up_within_a_host_is_not_rounded[aaaa]",
    ),
)

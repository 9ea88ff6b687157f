"""What a sum is made of: packets, repair, plans."""

from __future__ import annotations

from .model import ENGINE, mutation

SUMS = (
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
        "c->first_weighted(c, p.acc, own, payload, factor, p.n);",
        "c->first(c, p.acc, own, payload, p.n);",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "a host's sum of float16 travels as it is",
        "native/codec.c",
        "c->divides = c->holds_divided || encoding == LC_ENCODING_F16;",
        "c->divides = c->holds_divided = 0;",
        f"{ENGINE}/test_hierarchical.py::test_partial_sums_beyond_float16[same]",
    ),
    mutation(
        "owners keep the exact mean of what they send encoded",
        "native/payload.c",
        "if (s->desc.target == LC_TARGET_OUT && !partial && !s->op->call.keeps_sums)",
        "if (0)",
        f"{ENGINE}/test_encodings.py::test_replicas_are_equal_and_packets_fewer",
    ),
    mutation(
        "packets of another encoding believed",
        "native/stream_in.c",
        "h->encoding != s->in_codec->encoding ||",
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
        "s->op->codec.sums->add_weighted(p.acc, p.own, p.own_factor, p.n);",
        "(void)p.acc;",
        "native:test_sim",
    ),
    # ---- repair, parity ----
    mutation(
        "what finds no room in the list of records never told",
        "native/records_out.c",
        "if (p->n_records >= LC_RECORDS - LC_RECORDS / 8) {",
        "if (p->n_records > LC_RECORDS) {",
        "native:test_long",
    ),
    mutation(
        "one repair too few",
        "native/op.h",
        "in->round >= in->rounds;",
        "in->round + 1 >= in->rounds;",
        f"{ENGINE}/test_oracle.py::test_engine_equals_reference[3-loss=0.1,seed=6]",
    ),
    mutation(
        "only the first 128 packets asked for again",
        "native/records_out.c",
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
        "the parity of a window sent before its last packet",
        "native/parity.c",
        "sent >= (uint64_t)(i + 1) * e->window;",
        "sent + 1 >= (uint64_t)(i + 1) * e->window;",
        "native:test_parity",
    ),
    mutation(
        "rounds that were chosen not told",
        "native/op.h",
        "return lc_word(out->code, chosen ? out->rounds : 0);",
        "return lc_word(out->code, chosen ? 0 : 0);",
        f"{ENGINE}/test_parity.py::test_what_is_chosen_brings_back_what_the_reference_says"
        "[None-0.003-loss=0.1,dup=0.05,reorder=0.1,seed=11]",
    ),
    mutation(
        "parity for single losses where they come in runs",
        "native/recovery_choice.c",
        "lc_loss_burst(&p->loss),",
        "1,",
        "native:test_dial",
    ),
    mutation(
        "a set restored before enough of its rows have come",
        "native/parity.h",
        "return d->left[set] && d->n_rows[set] >= d->left[set];",
        "return d->left[set] && d->n_rows[set];",
        "native:test_parity",
    ),
    mutation(
        "the count of a restored packet not multiplied",
        "native/parity.c",
        "r->counts[j] ^= times_count(r->inverse[i * r->e + j], counts[r->which[i]]);",
        "r->counts[j] ^= counts[r->which[i]];",
        "native:test_parity",
    ),
    mutation(
        "data that lie where they came not taken from the rows",
        "native/stream_in.c",
        "    if (d->keeps)\n        add_others(in, set, r);\n",
        "",
        f"{ENGINE}/test_parity.py::test_what_is_needed_comes_and_brings_others_back[0]",
    ),
    mutation(
        "FIN doesn't say the code",
        "native/records_in.c",
        "if (!lc_in_learn(in, r->d)) {",
        "if (0) {",
        f"{ENGINE}/test_hostile_parity.py::test_parity_that_makes_no_sense_is_malformed",
    ),
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
        "key = key_of(seed ^ DOMAIN, group, op)",
        "key = key_of(seed ^ DOMAIN, group)",
        "tests/plan/test_builders.py::test_order_depends_on_everything",
    ),
    mutation(
        "sizes are not in the signature",
        "lossycoll/plan/model.py",
        "            parts.append(str(int(field)))",
        '            parts.append("0")',
        "tests/plan/test_builders.py::test_signature_differs_when_anything_differs",
    ),
    mutation(
        "the reference restores more of a set than rows have come",
        "tests/oracle/parity.py",
        "(lacks <= has)[self.of_data]",
        "(lacks <= has + 1)[self.of_data]",
        "tests/plan/test_sets.py::test_any_rows_bring_back_as_many_packets",
    ),
    mutation(
        "a relayed plan is kept when ranks are lost",
        "lossycoll/runtime/collectives/plan_cache.py",
        "replanned or members.complete or by.direct",
        "replanned or members.complete or by",
        "tests/runtime/collectives/test_plan_cache.py"
        "::test_only_direct_plans_are_kept_when_ranks_are_lost",
    ),
    mutation(
        "slots numbered as the engine numbers messages",
        "lossycoll/plan/model.py",
        "MOST_SLOTS: Final = 0xFFFE",
        "MOST_SLOTS: Final = 0xFFFF",
        "tests/runtime/collectives/test_accepted.py"
        "::test_numbers_of_slots_are_those_that_the_engine_takes",
    ),
    mutation(
        "owners are drawn by host, not by rank",
        "lossycoll/plan/hierarchical.py",
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
        "drawn = draw_order(options.seed, group, op & 0xFFFFFFFF, len(members.ranks))",
        "drawn = draw_order(options.seed, group, 0, len(members.ranks))",
        "tests/runtime/collectives/test_plan_cache.py"
        "::test_the_order_is_drawn_for_lossy_calls_of_those_that_want_it",
    ),
    mutation(
        'on_missing="zero" keeps',
        "lossycoll/runtime/collectives/endpoint.py",
        "Missing[options.on_missing.upper()]",
        'Missing["KEEP" if options.on_missing == "zero" else options.on_missing.upper()]',
        "tests/runtime/collectives/test_missing.py"
        "::test_what_is_missing_is_filled_as_the_option_says",
    ),
    mutation(
        "the progress thread flushes denormal numbers if who made it does",
        "native/loop.c",
        "    (void)lc_floats_exact();\n",
        "",
        "tests/runtime/engine/test_encodings.py"
        "::test_values_do_not_depend_on_how_a_thread_treats_denormal_numbers[same]",
    ),
    # ---- the order of ranks ----
    mutation(
        "sums that are to be in the order of ranks are in that of arrival",
        "native/op.c",
        "return call->deterministic && d->combine == LC_ADD &&",
        "return call->deterministic > 1 && d->combine == LC_ADD &&",
        "native:test_sim",
        seconds=120,
    ),
    mutation(
        "the own contribution is added first, whatever its rank",
        "native/op.c",
        "before += call->edges[d->first_edge + i].peer < rank;",
        "before += call->edges[d->first_edge + i].peer > 0xFFFF;",
        "native:test_sim",
        seconds=120,
    ),
    mutation(
        "in place, lower ranks' contributions take the memory of the own one",
        "native/op.c",
        "op->in_place && own_place(call, d, op->rank) > 1",
        "0",
        "native:test_sim",
        seconds=120,
    ),
    mutation(
        "what waits behind a contribution that is lost is never added",
        "native/combine.c",
        "        } else if (in->state == LC_IN_SETTLED) {\n            a->next++;",
        "        } else if (0) {\n            a->next++;",
        "native:test_sim",
        seconds=120,
    ),
)

"""Options, and who belongs to a group."""

from __future__ import annotations

from .model import PROTOCOL, mutation

MEMBERSHIP = (
    mutation(
        "options are equal though others of them are set",
        "lossycoll/options/fields.py",
        "return self._values == other._values",
        "return self._values[0] == other._values[0]",
        "tests/options/test_fields.py::test_what_was_given_is_distinguished_from_what_is_in_effect",
    ),
    mutation(
        "an option that ranks don't compare",
        "lossycoll/options/fields.py",
        "if row(entry).agree}",
        'if row(entry).agree and entry.name != "repair"}',
        "tests/runtime/world/test_compared.py"
        "::test_the_options_that_ranks_compare_are_those_that_the_table_marks",
    ),
    mutation(
        "an option that is set on one rank alone",
        "lossycoll/options/fields.py",
        "filter(self.is_given, COUNT_AS_GIVEN)",
        'filter(self.is_given, ("delivery",))',
        "tests/runtime/world/test_compared.py::test_definitions_differ_by_what_is_set",
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
        "lossycoll/runtime/world/membership.py",
        "            self._define(process)\n        elif",
        "            pass\n        elif",
        "tests/backend/test_connected.py"
        "::test_ranks_that_differ_in_a_group_are_named_by_its_first_call_on_all",
    ),
    mutation(
        "two groups of one name have one number",
        "lossycoll/backend/builder.py",
        'f"{self.session}/{self._names[name]}/{name}"',
        'f"{self.session}/{name}"',
        "tests/backend/test_connected.py"
        "::test_groups_are_made_without_the_store_in_any_number_order_and_time",
    ),
    mutation(
        "liveness doubled in the group",
        "lossycoll/backend/group_steps.py",
        "spec.rank, spec.size, options.liveness, secret=builder.secret",
        "spec.rank, spec.size, 2 * options.liveness, secret=builder.secret",
        "tests/backend/test_liveness.py::test_the_group_hands_its_liveness_on",
    ),
    mutation(
        "memory of who doesn't know the token is believed",
        "lossycoll/runtime/net/descriptor_exchange.py",
        "if not secrets.compare_digest(theirs, token.encode()):",
        "if 0:",
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
        "lossycoll/plan/topology.py",
        "if seconds > near and of_hosts[a] == of_hosts[b]:",
        "if False:",
        "tests/plan/test_sites.py::test_why_there_is_one_site",
    ),
    mutation(
        "learnt sites between which nothing is known",
        "lossycoll/plan/topology.py",
        "if (one, other) not in between:",
        "if False:",
        "tests/plan/test_sites.py::test_what_is_missing_never_divides_otherwise",
    ),
    mutation(
        "halls of a campus are two learnt sites",
        "lossycoll/plan/topology.py",
        "if far >= max(FAR, RATIO * near)]",
        "if far >= RATIO * near]",
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
        "lossycoll/runtime/world/world_protocol.py",
        "self._detector.silence = SILENT_SHARE * self.liveness",
        "self._detector.silence = 2 * SILENT_SHARE * self.liveness",
        f"{PROTOCOL}::test_silence_is_death_within_the_liveness_and_not_long_before",
    ),
    mutation(
        "a rank that slept accuses the others",
        "lossycoll/runtime/world/failure_detector.py",
        "                self.heard_at[rank] = min(now, at + late)",
        "                pass",
        f"{PROTOCOL}::test_ranks_that_slept_themselves_accuse_nobody",
    ),
    mutation(
        "what is said once isn't repeated to the next coordinator",
        "lossycoll/runtime/world/world_protocol.py",
        "if repeated.sender == self.rank:",
        "if False:",
        "tests/runtime/world/test_failover.py"
        "::test_what_is_said_while_the_coordinator_dies_is_said_again",
    ),
    mutation(
        "a death after a goodbye is a loss",
        "lossycoll/runtime/world/membership.py",
        "        elif not self._states.is_present(rank):\n            return\n",
        "",
        "tests/runtime/world/test_membership.py"
        "::test_a_rank_that_left_one_group_is_watched_for_the_others",
    ),
    mutation(
        "both halves of a network go on",
        "lossycoll/runtime/world/rank_states.py",
        "len({*of}) > 0 and min(of) in mine)",
        "len({*of}))",
        f"{PROTOCOL}::test_a_half_with_the_lowest_rank_goes_on",
    ),
    mutation(
        "a forked child keeps the control plane's sockets",
        "lossycoll/runtime/control/transport.py",
        "    close_copies(listening, leading)\n",
        "",
        "tests/backend/test_worlds.py"
        "::test_a_killed_rank_is_noticed_at_once_though_its_forked_child_lives",
    ),
    mutation(
        "the engine of a rank that is late isn't asked",
        "lossycoll/runtime/world/world_protocol.py",
        "self._detector.lives(rank, self.pulse(rank))",
        "pass",
        "tests/runtime/world/test_world_protocol.py"
        "::test_a_rank_whose_engine_answers_is_no_death_and_one_whose_engine_stops_is",
    ),
    # ---- what an operator is told ----
    mutation(
        "a rank that the group has given up is waited for",
        "lossycoll/runtime/world/job_status.py",
        " and p not in given_up",
        "",
        "tests/runtime/world/test_job_status.py::test_a_rank_that_was_given_up_is_not_waited_for",
    ),
    mutation(
        "a stopped rank's silence counts as others'",
        "lossycoll/runtime/world/job_status.py",
        "if all(other.state == status_page.STOPPED for other in others):",
        "if False:",
        "tests/runtime/world/test_job_status.py"
        "::test_states_are_by_the_kernel_then_by_what_others_know",
    ),
    mutation(
        "a metrics port that another program has is no matter",
        "lossycoll/runtime/world/metrics.py",
        "if is_first and not _tells",
        "if False and not _tells",
        "tests/runtime/world/test_metrics.py"
        "::test_a_port_that_another_program_has_is_told_once_and_taken_when_it_is_free",
    ),
    mutation(
        "split groups are counted whoever is in them",
        "lossycoll/backend/process_group.py",
        "        self._splits[tuple(chosen)] += 1\n        number = self._splits[tuple(chosen)]\n",
        "        self._splits[()] += 1\n        number = self._splits[()]\n",
        "tests/backend/test_twenty_groups.py::test_twenty_groups_after_the_members_have_changed",
    ),
    mutation(
        "split groups are counted for ever, though a newcomer has no count",
        "lossycoll/backend/process_group.py",
        "        self._splits: Counter[tuple[int, ...]] = Counter()\n",
        '        self._splits = getattr(self, "_splits", Counter())\n',
        "tests/backend/test_twenty_groups.py::test_twenty_groups_after_the_members_have_changed",
    ),
)

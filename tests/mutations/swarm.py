"""Mistakes in swarms and in what the engine does for them, each with a test that sees it."""

from __future__ import annotations

from .model import mutation

SWARM = (
    mutation(
        "a path that keeps what was known of another process",
        "native/path.c",
        "    forget(h, p);\n",
        "    (void)forget;\n",
        "native:test_admission",
    ),
    mutation(
        "a path that is made anew under a group",
        "native/path.c",
        "if (is_member(h, a->process))",
        "if (is_member(h, a->process) > 1)",
        "native:test_admission",
    ),
    mutation(
        "a weighted sum that nobody divides",
        "native/combine.c",
        "return call->scale / weights_of(s, k);",
        "return call->scale / contributions;",
        "tests/runtime/swarm/test_member.py::test_values_count_by_their_weights",
    ),
    mutation(
        "a weight of what never came",
        "native/combine.c",
        "sum += lc_bit(s->ins[i].arrived, k) ? weights[s->ins[i].peer] : 0;",
        "sum += weights[s->ins[i].peer];",
        "tests/runtime/engine/test_owners.py::test_engine_equals_reference",
    ),
    mutation(
        "what rounding takes that nobody remembers",
        "lossycoll/runtime/swarm/means.py",
        "self._means.owed = self._owed",
        "self._means.owed = 0 * self._owed",
        "tests/runtime/swarm/test_means.py::test_small_steps_add_up",
    ),
    mutation(
        "errors of rounding that feed the next ones",
        "lossycoll/runtime/swarm/means.py",
        "np.clip(wanted, low, high, out=self.buffer)",
        "np.clip(wanted, low - high, high - low + high, out=self.buffer)",
        "tests/runtime/swarm/test_means.py::test_what_is_owed_makes_no_grid_coarser",
    ),
    mutation(
        "an owner that keeps what others don't have",
        "lossycoll/runtime/swarm/means.py",
        "own[:] = got",
        "assert len(own) == len(got)",
        "tests/runtime/swarm/test_means.py::test_a_round_is_the_twins_to_the_bit",
    ),
    mutation(
        "a slow link that owns as much as a fast one",
        "lossycoll/plan/owners.py",
        "(world - 2 + count) * fastest[count] > total",
        "fastest[count] > 0",
        "tests/plan/test_owners.py::test_no_other_parts_end_sooner",
    ),
    mutation(
        "a directory that stands by takes peers in",
        "lossycoll/runtime/swarm/server.py",
        'if self._owner not in ("", wanted.name):',
        'if self._owner not in ("", wanted.name, self._owner):',
        "tests/runtime/swarm/test_trouble.py::test_one_that_stands_by_says_whom_to_ask",
    ),
    mutation(
        "a weight of any size",
        "lossycoll/runtime/swarm/protocol.py",
        "not 0 <= value <= MOST_WEIGHT:",
        "not 0 <= value <= 1e300:",
        "tests/runtime/swarm/test_protocol.py::test_what_is_no_message",
    ),
    mutation(
        "peers that move to places which are taken",
        "lossycoll/plan/grid.py",
        "out[group] = line + dealt * self._stride(axis)",
        "out[group] = line + dealt // 2 * self._stride(axis)",
        "tests/plan/test_grid.py::test_peers_of_one_group_meet_others_next",
    ),
    mutation(
        "late peers that nobody waits for",
        "lossycoll/runtime/swarm/directory.py",
        "_is_ready(one) or now < self._awaited_until(one, first)",
        "_is_ready(one) or now < first",
        "tests/runtime/swarm/test_directory.py"
        "::test_late_peers_are_waited_for_as_long_as_earlier_rounds_teach",
    ),
    mutation(
        "newcomers that are a group by themselves",
        "lossycoll/runtime/swarm/directory.py",
        "counts = [one.ready_at for one in here if one.weight]",
        "counts = [one.ready_at for one in here]",
        "tests/runtime/swarm/test_directory.py::test_newcomers_wait_for_those_that_count",
    ),
    mutation(
        "a chunk that nobody looks at",
        "lossycoll/runtime/swarm/state.py",
        "if digest_of(self._chunks[number]) != self.manifest.digests[number]:",
        "if not self.manifest.digests:",
        "tests/runtime/swarm/test_loans.py::test_a_lender_whose_chunks_are_others_is_left",
    ),
    mutation(
        "what a newcomer has comes again",
        "lossycoll/runtime/swarm/state.py",
        "if chunk is not None and len(chunk) == len(self._chunks[number]):",
        "if chunk is not None and not len(self._chunks[number]):",
        "tests/runtime/swarm/test_loans.py::test_only_what_has_changed_is_sent",
    ),
    mutation(
        "a loan that outlives its lender",
        "lossycoll/runtime/swarm/paths.py",
        "self._end_loans(lambda member: member.coming == coming)",
        "self._end_loans(lambda member: False)",
        "tests/runtime/swarm/test_loans.py::test_the_only_lender_leaves",
    ),
    mutation(
        "a newcomer that counts before it has trained",
        "lossycoll/train/moshpit/sgd.py",
        "_Round(self._averager, values, 0.0, timeout)",
        "_Round(self._averager, values, 1.0, timeout)",
        "tests/train/moshpit/test_catch_up.py::test_a_newcomer_goes_on_as_the_others[parameters]",
    ),
    mutation(
        "a state from before the latest round",
        "lossycoll/runtime/swarm/state.py",
        "(one for one in manifests if one.round == latest)",
        "(one for one in manifests if one.round <= latest)",
        "tests/runtime/swarm/test_state.py"
        "::test_the_state_of_the_latest_round_is_chosen_that_most_others_have",
    ),
    mutation(
        "keys of a path that two meetings share",
        "lossycoll/runtime/swarm/paths.py",
        "salt = route.salt.hex()",
        'salt = ""',
        "tests/runtime/swarm/test_member.py::test_peers_that_meet_anew_have_new_keys",
    ),
    mutation(
        "knocks of any key",
        "lossycoll/runtime/swarm/knock.py",
        "if not hmac.compare_digest(tag, _tag(key, body)):",
        "if tag == b'':",
        "tests/runtime/swarm/test_knock.py::test_what_another_swarm_says",
    ),
    mutation(
        "an answer of an earlier try",
        "lossycoll/runtime/swarm/meetings.py",
        "if one is None or knock.echo != one.nonce:",
        "if one is None:",
        "tests/runtime/swarm/test_meetings.py::test_what_was_said_once_is_not_believed_again",
    ),
    mutation(
        "a knock that is repeated undoes a route",
        "lossycoll/runtime/swarm/meetings.py",
        "        asks = Knock(Kind.KNOCK, self.number, knock.sender, short(route.own), nonce)\n",
        "        route.doubted = True\n"
        "        asks = Knock(Kind.KNOCK, self.number, knock.sender, short(route.own), nonce)\n",
        "tests/runtime/swarm/test_meetings.py::test_an_old_knock_undoes_no_route",
    ),
    mutation(
        "pairs that are apart in one group",
        "lossycoll/runtime/swarm/apart.py",
        "if not degree[one] or not any(apart(one, k) for k in group)",
        "if not degree[one] or not all(apart(one, k) for k in group)",
        "tests/runtime/swarm/test_apart.py::test_no_group_has_a_pair_that_is_apart",
    ),
    mutation(
        "a directory that answers any number of knocks",
        "lossycoll/runtime/swarm/observer.py",
        "self._credit -= 1",
        "self._credit -= 0",
        "tests/runtime/swarm/test_observer.py::test_answers_are_bounded",
    ),
    mutation(
        "peers that say of anybody that it is out of reach",
        "lossycoll/runtime/swarm/directory.py",
        "others = ({*peer.group, *peer.partners} - {number}) & self.peers.keys()",
        "others = self.peers.keys() - {number}",
        "tests/runtime/swarm/test_directory.py"
        "::test_nobody_says_of_others_that_they_are_out_of_reach",
    ),
    mutation(
        "datagrams aside that nobody is woken for",
        "native/asides.c",
        "if (atomic_load(&asides->out) == in)",
        "if (atomic_load(&asides->out) == in + 1)",
        "tests/runtime/engine/test_asides.py::test_they_come_and_go_by_the_engines_socket",
    ),
)

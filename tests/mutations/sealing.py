"""What is sealed, with which keys, and what is believed of it."""

from __future__ import annotations

from .model import ENGINE, mutation

SEALING = (
    mutation(
        "a tag unchecked",
        "native/crypto.c",
        "           lib.final(aead->ctx, want, &rest) == 1;",
        "           lib.final(aead->ctx, want, &rest) < 2;",
        "native:test_seal",
    ),
    mutation(
        "a header that may be changed",
        "native/crypto.c",
        "           (!known.iov_len ||",
        "           (!known.iov_base || known.iov_len > 1 ||",
        "native:test_seal",
    ),
    mutation(
        "a number that is used twice",
        "native/seal.c",
        "    seal->out_number++;\n",
        "    seal->out_number |= 1;\n",
        "native:test_seal",
    ),
    mutation(
        "a number that isn't in the IV",
        "native/seal.c",
        "        iv[LC_IV_BYTES - 8 + i] ^= (uint8_t)(number >> 8 * i);\n",
        "        iv[LC_IV_BYTES - 8 + i] ^= (uint8_t)(number >> 8 * i & 0);\n",
        "native:test_seal",
    ),
    mutation(
        "a datagram that comes twice is taken twice",
        "native/seal.c",
        "    lc_replay_note(&seal->replay, number);\n",
        "",
        "native:test_seal",
    ),
    mutation(
        "a window that is marked before the tag is known",
        "native/seal.c",
        "        return LC_REPLAYED;\n",
        "        return LC_REPLAYED;\n    lc_replay_note(&seal->replay, number);\n",
        "native:test_seal",
    ),
    mutation(
        "what is older than the window is new",
        "native/replay.h",
        "return r->next - number <= LC_REPLAY_WINDOW &&",
        "return r->next - number <= 2 * LC_REPLAY_WINDOW &&",
        "native:test_seal",
    ),
    mutation(
        "an epoch that a packet claims is believed",
        "native/seal.c",
        "    lc_epoch_key *key = key_of(seal, epoch_of(seal, low), now);\n",
        "    lc_epoch_key *key = key_of(seal, epoch_of(seal, low), now);\n"
        "    seal->in_epoch = epoch_of(seal, low);\n",
        "native:test_seal",
    ),
    mutation(
        "keys that don't wear out",
        "native/seal.c",
        "return seal->out_number - seal->out_first >= LC_EPOCH_PACKETS ||",
        "return seal->out_number - seal->out_first >= UINT64_MAX ||",
        "native:test_seal",
    ),
    mutation(
        "keys of any age",
        "native/seal.c",
        "(how->rekey_ns && now - seal->out_since_ns >= how->rekey_ns && seal->out_since_ns);",
        "(how->rekey_ns && now - seal->out_since_ns >= UINT64_MAX);",
        "native:test_seal",
    ),
    mutation(
        "the same keys there and back",
        "lossycoll/runtime/keys/secret.py",
        'self.derived("link", meeting, sender, receiver)',
        'self.derived("link", meeting, min(sender, receiver), max(sender, receiver))',
        "tests/runtime/keys/test_secret.py"
        "::test_both_ends_of_a_path_derive_the_same_and_no_two_directions_do",
    ),
    mutation(
        "the same keys in every meeting",
        "lossycoll/runtime/keys/secret.py",
        '"/".join([session, *nonces])',
        '"/".join([session])',
        "tests/runtime/keys/test_secret.py"
        "::test_a_meeting_is_told_from_others_by_each_rank_s_nonce",
    ),
    mutation(
        "a secret file that anybody may read",
        "lossycoll/runtime/keys/secret.py",
        "if mode & 0o077:",
        "if mode & 0o007:",
        "tests/runtime/keys/test_secret.py::test_a_file_that_others_may_use_is_refused",
    ),
    mutation(
        "a value under another's name",
        "lossycoll/runtime/keys/aead.py",
        "sealed, name.encode())\n        return None if",
        "sealed, b'')\n        return None if",
        "tests/runtime/keys/test_aead.py"
        "::test_a_value_opens_under_its_own_name_with_the_same_secret_alone",
    ),
    mutation(
        "a connection with one key for both ways",
        "lossycoll/runtime/swarm/valkey_relay.py",
        'for direction in (b"there", b"back")',
        'for direction in (b"there", b"there")',
        "tests/runtime/swarm/test_relayed.py::test_a_frame_that_is_turned_round_does_not_open",
    ),
    mutation(
        "a connection whose keys need one end's nonce alone",
        "lossycoll/runtime/swarm/valkey_relay.py",
        "both = self._nonce + nonce if self._connects else nonce + self._nonce",
        "both = self._nonce if self._connects else nonce",
        "tests/runtime/swarm/test_relayed.py::test_a_connection_that_was_recorded_opens_nowhere",
    ),
    mutation(
        "new keys for whoever asks in clear",
        "lossycoll/runtime/world/connections.py",
        'if came and purpose == "rekey" and self.secret is not None:',
        'if came and purpose == "rekey":',
        "tests/runtime/world/test_connections.py::test_a_plain_connection_cannot_ask_for_new_keys",
    ),
    mutation(
        "a caller that isn't in the roster",
        "lossycoll/runtime/control/context.py",
        "(domain, *key) in self.admitted",
        "bool(key)",
        "tests/runtime/control/test_curve.py::test_a_caller_that_isnt_in_the_roster_is_refused",
    ),
    mutation(
        "a sealed message that may be left out",
        "lossycoll/runtime/control/transport.py",
        "if len(bodies) != 1 or not bodies[0].startswith(number):",
        "if len(bodies) != 1:",
        "tests/runtime/control/test_curve.py"
        "::test_whatever_is_done_to_sealed_messages_isnt_believed",
    ),
    mutation(
        "one key for all planes",
        "lossycoll/runtime/control/context.py",
        'secret.derived("curve", plane, role)',
        'secret.derived("curve", role)',
        "tests/runtime/control/test_curve.py"
        "::test_keys_are_one_secrets_one_planes_and_one_roles_and_arent_shown",
    ),
    mutation(
        "a host whose datagrams aren't sealed",
        "native/host.c",
        "        if (!via->link->local) /*",
        "        if (via->link->local) /*",
        f"{ENGINE}/test_sealed.py::test_nothing_can_be_read_on_the_wire",
    ),
    mutation(
        "a key for every claim",
        "native/seal.c",
        "    seal->claim_again_ns = now + LC_CLAIM_NS;\n",
        "",
        "native:test_seal",
    ),
    mutation(
        "no key for the epoch that comes next",
        "native/seal.c",
        "    if (!find_key(seal, epoch + 1))\n        make_key(seal, epoch + 1);\n",
        "",
        "native:test_seal",
    ),
    mutation(
        "a cipher that isn't tried",
        "native/crypto.c",
        "!missing && lib.ciphers[cipher] && seals_right(cipher);",
        "!missing && lib.ciphers[cipher];",
        "tests/runtime/keys/test_aead.py::test_a_library_is_believed_by_what_it_does",
    ),
    mutation(
        "a part in clear of a group in clear, though there is a secret",
        "lossycoll/backend/bootstrap.py",
        "if builder.secret is not None and not (world.host.is_sealed or asked):",
        "if builder.secret is not None and asked is None:",
        "tests/backend/test_sealed.py"
        "::test_a_part_of_a_group_in_clear_is_refused_once_there_is_a_secret",
    ),
    mutation(
        "a doctor who tells secrets",
        "lossycoll/cli/doctor/checks.py",
        'f"{n}={os.environ[n]}" if n in shown else f"{n} (set)"',
        'f"{n}={os.environ[n]}"',
        "tests/cli/doctor/test_command.py::test_no_secret_is_shown",
    ),
    mutation(
        "a differing secret that nobody hears of",
        "lossycoll/runtime/world/rendezvous.py",
        "                refusal = self._find_apart(written, roster)\n",
        "                refusal = None\n",
        "tests/runtime/world/test_rendezvous.py::test_ranks_whose_secrets_differ_all_say_so",
    ),
)

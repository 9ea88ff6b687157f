"""States in chunks: what a manifest says, whose state is taken, and which chunk comes from whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.swarm.state_transfer import CHUNK, Gathering, Manifest, Snapshot, chosen

MOST = 1 << 30


def snapshot(length: int, seed: int = 0, number: int = 7) -> Snapshot:
    data = np.random.default_rng(seed).integers(0, 256, length, np.uint8)
    return Snapshot(number, b"what it is", data)


def changed(one: Snapshot, *chunks: int) -> Snapshot:
    data = one.data.copy()
    for chunk in chunks:
        data[chunk * CHUNK] ^= 1
    return Snapshot(one.round, one.skeleton, data)


@pytest.mark.parametrize("length", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_manifests_are_read_as_they_were_written(length: int) -> None:
    one = snapshot(length).manifest()
    assert Manifest.unpack(one.packed(), MOST) == one
    assert len(one.digests) == -(-length // CHUNK)


def test_what_is_no_manifest() -> None:
    packed = snapshot(2 * CHUNK + 5).manifest().packed()
    for cut in (0, 1, 23, 24, len(packed) - 1):
        with pytest.raises(Malformed):
            Manifest.unpack(packed[:cut], MOST)
    with pytest.raises(Malformed, match="wanted at most"):
        Manifest.unpack(packed, 2 * CHUNK + 4)
    with pytest.raises(Malformed, match="a manifest of"):
        Manifest.unpack(packed + b"x", MOST)
    random = np.random.default_rng(3)
    for _ in range(300):
        broken = bytearray(packed)
        broken[int(random.integers(24))] ^= int(random.integers(1, 256))
        try:
            found = Manifest.unpack(bytes(broken), MOST)
        except Malformed:
            continue
        assert found.length <= MOST
        assert len(found.digests) == -(-found.length // CHUNK)


def test_the_state_of_the_latest_round_is_chosen_that_most_others_have() -> None:
    old = snapshot(4 * CHUNK, number=6).manifest()
    common = snapshot(4 * CHUNK, seed=1)
    odd = changed(common, 0, 1, 2)
    manifests = [old, old, odd.manifest(), common.manifest(), changed(common, 3).manifest()]
    assert chosen(manifests) == common.manifest()


def gathered(gathering: Gathering, *donors: Snapshot) -> list[int]:
    """All donors serve at once, each by its thread. How many chunks came of each."""
    counts = [0] * len(donors)

    def serve(which: int) -> None:
        chunks = donors[which].chunks()
        held = {digest: n for n, digest in enumerate(donors[which].manifest().digests)}
        while numbers := gathering.take(held, 2):
            for number in numbers:
                gathering.chunks[number][:] = chunks[held[gathering.manifest.digests[number]]]
                assert gathering.put(number)
                counts[which] += 1

    run([lambda which=which: serve(which) for which in range(len(donors))])
    return counts


def run(works: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_each_chunk_comes_from_one_that_has_it() -> None:
    wanted = snapshot(5 * CHUNK + 100)
    other = changed(wanted, 1, 2)
    gathering = Gathering(wanted.manifest())
    counts = gathered(gathering, wanted, other)
    assert gathering.complete
    np.testing.assert_array_equal(gathering.data, wanted.data)
    assert sum(counts) == 6
    assert counts[0] >= 2  # those that the other one doesn't have


def test_whoever_waits_gets_what_another_gives_back() -> None:
    """One takes all that there is, and fails; the other waits for just that."""
    wanted = snapshot(3 * CHUNK)
    gathering = Gathering(wanted.manifest())
    held = {digest: n for n, digest in enumerate(wanted.manifest().digests)}
    numbers = gathering.take(held, 8)
    assert numbers == [0, 1, 2]
    timer = threading.Timer(0.2, gathering.give_back, [numbers])
    timer.start()
    assert gathered(gathering, wanted) == [3]
    timer.join()
    assert gathering.complete


def test_a_donor_that_has_nothing_of_it_is_asked_for_nothing() -> None:
    gathering = Gathering(snapshot(2 * CHUNK).manifest())
    assert gathering.take({b"x" * 16: 0}, 8) == []
    assert not gathering.complete

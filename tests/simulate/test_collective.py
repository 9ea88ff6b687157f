"""Simulated hosts: what they take, lose and count follows from the network that was described."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from lossycoll.errors import OptionError
from lossycoll.lab.network import ETHERNET_BYTES, Link, Network, Port, link_fields
from lossycoll.lab.tcp import Flows
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.payload import (
    HEADER_BYTES,
    IP_UDP_BYTES,
    TAG_BYTES,
    payload_bytes,
)
from lossycoll.runtime.keys.secret import Secret
from lossycoll.simulate import collective as module
from lossycoll.simulate.collective import (
    COLLECTIVES,
    Change,
    Simulated,
    simulate_collective,
    usual_whole,
)
from lossycoll.simulate.fold import NotAlikeError
from lossycoll.simulate.hosts import Hosts

MIB = 1 << 20
QUIET = Network(link=Link(delay_ms=5), port=Port(up_mbit=200, down_mbit=200, queue_ms=25))


def with_link(**changes: float) -> Network:
    return replace(QUIET, link=replace(QUIET.link, **changes))


def dropped(found: Simulated) -> int:
    return sum(
        call.counts.dropped_up + call.counts.dropped_down + call.counts.policed
        for call in found.calls
    )


def test_two_hosts_lose_nothing_and_take_no_less_than_their_ports_do() -> None:
    found = simulate_collective(QUIET, MIB)
    assert not found.failed
    assert found.missing == 0
    assert dropped(found) == 0
    wire = HEADER_BYTES + IP_UDP_BYTES[4] + ETHERNET_BYTES
    packet = payload_bytes(1500, 4)
    for call in found.calls:
        assert call.limit == pytest.approx(MIB * 8e-6 / 200 + 0.01, rel=0.01)
        # The port is busy all the time, and the last packet has its way to go.
        assert call.seconds > MIB * (1 + wire / packet) * 8e-6 / 200 + 0.005
        # Each host sends half the tensor twice; control is small beside it.
        data = 2 * MIB * (1 + wire / packet)
        assert data <= call.counts.bytes < 1.1 * data
        assert call.counts.local_packets == 0
    assert "200 Mbit/s" in found.bound


def test_paths_of_a_host_share_its_port_alike_unless_one_is_slow() -> None:
    alike = simulate_collective(QUIET, MIB, hosts=4)
    assert 1 <= alike.spread < 1.1
    slow = replace(QUIET, hosts=4).with_link((0, 1), rate_mbit=10)
    assert simulate_collective(slow, MIB, hosts=4).spread > 1.5


def test_sealed_packets_have_tags_and_are_opened() -> None:
    plain, sealed = (
        simulate_collective(QUIET, MIB, hosts=3, secret=secret)
        for secret in (None, Secret.of(b"a secret of some length"))
    )
    assert not sealed.failed
    assert sealed.missing == 0
    for one, other in zip(plain.calls, sealed.calls, strict=True):
        more = other.counts.bytes - one.counts.bytes
        assert more == pytest.approx(TAG_BYTES * one.counts.packets, rel=0.2)
    with pytest.raises(NotAlikeError, match="sealed"):
        simulate_collective(QUIET, MIB, hosts=4, whole=2, secret=Secret.of(b"any"))


def test_large_packets_leave_a_port_that_may_send_little() -> None:
    """A rate's burst is one of packets, however large they are."""
    far = replace(with_link(delay_ms=100), mtu=9000)
    found = simulate_collective(far, 2 * MIB, hosts=3, ranks_per_host=8, calls=3)
    assert not found.failed
    assert found.missing == 0
    assert max(call.seconds for call in found.calls) < 5


def test_packets_of_short_streams_leave_a_port_no_faster_for_being_small() -> None:
    """Parity alone makes them a third as large. A port that took them for full ones believed that
    it carried three times as much as it did."""
    alone = Options(max_missing=0.01, repair=0)
    port = Port(up_mbit=100, down_mbit=100, queue_ms=25)
    found = simulate_collective(replace(QUIET, port=port), 4 * MIB, hosts=8, options=alone)
    full = simulate_collective(replace(QUIET, port=port), 4 * MIB, hosts=8)
    assert found.calls[-1].counts.packets > 1.5 * full.calls[-1].counts.packets
    steady = sum(call.counts.packets for call in found.steady)
    lost = sum(call.counts.dropped_up + call.counts.dropped_down for call in found.steady)
    assert lost < 0.002 * steady
    assert found.ratio < 1.2


def test_a_lone_path_s_law_holds_for_small_packets() -> None:
    alone = Options(max_missing=0.01, repair=0)
    policed = Network(link=Link(delay_ms=10), port=Port(up_mbit=100, down_mbit=100, policer_ms=10))
    found = simulate_collective(policed, MIB, options=alone, calls=12, settle=7)
    assert sum(call.counts.policed for call in found.calls) > 0
    assert found.missing < 0.03


def test_losses_in_bursts_take_little_more_time_than_single_ones() -> None:
    """A burst swallows what is told again once in a round trip, too, and makes a port's share lost
    vary by more than single losses do."""
    times = {}
    for burst in (1.0, 8.0):
        link = Link(delay_ms=10, loss=0.1, burst=burst)
        network = Network(link=link, port=Port(up_mbit=100, down_mbit=100, queue_ms=25))
        found = simulate_collective(network, MIB, hosts=4, calls=20, settle=4)
        assert sum(call.counts.lost for call in found.steady) > 0.05 * sum(
            call.counts.packets for call in found.steady
        )
        times[burst] = found.ratio
    assert times[8.0] < 1.5 * times[1.0]


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    lossy = with_link(loss=0.05)
    first, again = (simulate_collective(lossy, MIB, hosts=3) for _ in range(2))
    assert first == again
    other = simulate_collective(replace(lossy, seed=2), MIB, hosts=3)
    assert other.calls != first.calls


def test_what_the_network_loses_is_missing_to_the_counting_error() -> None:
    packets = 4 * 2 * MIB // payload_bytes(1500, 4)
    calm = 0
    for seed in (1, 2, 3):
        found = simulate_collective(replace(with_link(loss=0.05), seed=seed), 2 * MIB, calls=4)
        share = sum(call.missing for call in found.calls) / 4
        if dropped(found):  # as the rate is found again after a test of the loss
            assert dropped(found) < 0.03 * sum(call.counts.packets for call in found.calls)
            continue
        calm += 1
        assert share == pytest.approx(0.05, abs=4 * math.sqrt(0.05 / packets))
        # Control is lost as well.
        assert sum(call.counts.lost for call in found.calls) > share * packets * 2
    assert calm >= 2


def test_reliable_delivery_leaves_nothing_missing() -> None:
    options = Options(delivery="reliable")
    found = simulate_collective(with_link(loss=0.05), MIB, options=options)
    assert not found.failed
    assert sum(call.counts.lost for call in found.calls) > 0
    assert all(call.missing == 0 and call.resent > 0 for call in found.calls)


def test_a_policer_lets_its_rate_pass_and_what_its_bucket_holds() -> None:
    port = Port(up_mbit=50, down_mbit=1000, policer_ms=10)
    found = simulate_collective(replace(QUIET, port=port), MIB, calls=4)
    assert sum(call.counts.policed for call in found.calls) > 0
    size = payload_bytes(1500, 4) + HEADER_BYTES + IP_UDP_BYTES[4] + ETHERNET_BYTES
    for call in found.calls:
        passed = call.counts.bytes - call.counts.policed * size
        assert passed <= 2 * 50e6 / 8 * (call.seconds + 0.011)


def test_ranks_of_a_host_share_its_memory_and_its_port() -> None:
    alone = simulate_collective(QUIET, MIB)
    shared = simulate_collective(QUIET, MIB, ranks_per_host=4)
    assert not shared.failed
    for one, other in zip(alone.calls, shared.calls, strict=True):
        assert other.counts.local_bytes > 4 * MIB
        assert other.limit == pytest.approx(one.limit, rel=0.01)
        assert other.counts.bytes < 1.2 * one.counts.bytes
        assert other.seconds > other.limit - 0.005


def test_a_change_comes_at_its_time_and_stays() -> None:
    slow = replace(QUIET, port=Port(up_mbit=20, down_mbit=20, queue_ms=25))
    found = simulate_collective(QUIET, MIB, calls=5, changes=[Change(1, 0.02, slow)])
    limits = [call.limit for call in found.calls]
    assert limits[1] == limits[0]
    assert limits[2] == pytest.approx(MIB * 8e-6 / 20 + 0.01, rel=0.01)
    assert found.calls[1].seconds > 2 * found.calls[0].seconds
    assert found.steady[-1].seconds > MIB * 8e-6 / 20


def test_time_passes_between_calls_without_any_of_them() -> None:
    close, apart = (simulate_collective(QUIET, MIB, gap=gap) for gap in (0.0, 2.0))
    assert apart.calls != close.calls
    assert apart.seconds < 2 * close.seconds


def test_a_cut_link_ends_lossy_calls_with_what_came() -> None:
    found = simulate_collective(with_link(loss=1.0), 64 << 10, calls=2, settle=0)
    assert not found.failed
    assert all(call.counts.lost == call.counts.packets for call in found.calls)
    assert found.missing == 1


def test_ranks_that_know_their_partners_alone_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_known = simulate_collective(QUIET, MIB, hosts=4, ranks_per_host=2)
    monkeypatch.setattr(module, "MOST_KNOWN", 7)
    partners = simulate_collective(QUIET, MIB, hosts=4, ranks_per_host=2)
    assert not partners.failed
    assert partners.missing == all_known.missing == 0
    assert partners.seconds == pytest.approx(all_known.seconds, rel=0.05)
    with pytest.raises(OptionError, match="in 56 ways; wanted 49 at most"):
        simulate_collective(QUIET, MIB, hosts=8)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_ends(collective: str) -> None:
    found = simulate_collective(
        with_link(loss=0.02), MIB // 2, collective=collective, hosts=3, calls=3
    )
    assert not found.failed
    assert len(found.calls) == 3
    assert all(call.seconds > 0 and call.counts.packets > 0 for call in found.calls)


def test_ports_that_differ_bound_the_call() -> None:
    network = replace(QUIET, hosts=3).with_port(1, up_mbit=50)
    found = simulate_collective(network, MIB)
    assert found.bound == "50 Mbit/s up of host 1"
    assert found.seconds > found.steady[0].limit - 0.005


def test_encoded_elements_take_less_of_the_network() -> None:
    plain = simulate_collective(QUIET, MIB)
    int8 = simulate_collective(QUIET, MIB, options=Options(wire="int8"))
    assert int8.calls[0].counts.bytes < plain.calls[0].counts.bytes / 3
    assert int8.calls[0].limit < plain.calls[0].limit
    assert int8.seconds > int8.steady[0].limit - 0.005


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"collective": "all_reduced"}, "no collective 'all_reduced'"),
        ({"hosts": 1}, "1 hosts of 1 ranks; wanted 2 ranks at least"),
        ({"hosts": 64, "ranks_per_host": 64}, "are 4096 ranks"),
        ({"calls": 2, "settle": 2}, "2 of 2 calls are left out"),
    ],
)
def test_refusals(how: dict[str, object], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        simulate_collective(QUIET, MIB, **how)  # type: ignore[arg-type]


def test_a_gateway_bounds_what_leaves_its_site() -> None:
    gateway = Port(up_mbit=50, down_mbit=50)
    network = Network(
        sites=2,
        hosts=2,
        wan=Link(delay_ms=5),
        port=Port(up_mbit=1000, down_mbit=1000),
        gateway=gateway,
    )
    found = simulate_collective(network, 2 * MIB)
    assert found.bound == "50 Mbit/s up of site 0"
    least = 2 * MIB * 8e-6 / 50 + 0.01  # half a sum goes each way, twice
    assert found.steady[0].limit == pytest.approx(least, rel=0.01)
    assert least < found.seconds < 1.3 * least
    for call in found.steady:  # each gateway lets out 2 MiB, and what is sent within sites is more
        assert 4 * MIB < call.counts.site_bytes < 1.15 * 4 * MIB
        assert 0 < call.counts.site_packets < call.counts.packets


def test_hosts_behind_a_gateway_send_at_equal_rates() -> None:
    """All wait for the slowest: by the gateway's queue alone they took 1.25 of the limit."""
    gateway = Port(up_mbit=200, down_mbit=200)
    port = Port(up_mbit=1000, down_mbit=1000)
    network = Network(sites=2, hosts=4, wan=Link(delay_ms=10), port=port, gateway=gateway)
    found = simulate_collective(network, 8 * MIB, calls=7, settle=2)
    assert sum(call.counts.packets for call in found.calls) > 0
    assert found.seconds < 1.19 * found.steady[0].limit
    assert found.missing < 0.005


def test_hosts_overrun_a_gateway_that_nobody_paces() -> None:
    gateway = Port(up_mbit=5, down_mbit=5, queue_ms=5)
    network = Network(sites=2, hosts=4, port=Port(up_mbit=1000, down_mbit=1000), gateway=gateway)
    found = simulate_collective(network, MIB, options=Options(algorithm="transpose"), calls=3)
    assert sum(call.counts.dropped_gateway for call in found.calls) > 0
    assert all(call.counts.dropped_up == 0 for call in found.calls)


@pytest.mark.parametrize("algorithm", ["transpose", "ring"])
def test_hosts_that_stand_for_others_take_as_long_and_send_as_much(algorithm: str) -> None:
    how: dict[str, Any] = {
        "hosts": 16,
        "options": Options(algorithm=algorithm),
        "calls": 5,
    }
    packet = payload_bytes(1500, 4)
    size = 16 * 16 * packet
    every = simulate_collective(with_link(loss=0.02), size, **how)
    some = simulate_collective(with_link(loss=0.02), size, whole=4, **how)
    assert not some.failed
    assert (some.hosts, some.whole, some.nbytes) == (16, 4, size)
    for one, other in zip(every.calls, some.calls, strict=True):
        assert other.limit == pytest.approx(one.limit)
        assert other.counts.packets == pytest.approx(one.counts.packets, rel=0.1)
    lost = [sum(call.counts.lost for call in found.calls) for found in (every, some)]
    assert lost[1] == pytest.approx(lost[0], rel=0.3)


def test_the_time_of_all_hosts_is_in_the_interval_of_a_few_that_stand_for_all() -> None:
    every, some = (simulate_collective(QUIET, MIB, hosts=16, whole=whole) for whole in (None, 4))
    assert every.interval == (every.seconds, every.seconds)
    low, high = some.interval
    assert low < every.seconds < high < 1.5 * low


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
def test_hosts_of_several_ranks_stand_for_others(collective: str) -> None:
    how: dict[str, Any] = {"collective": collective, "hosts": 6, "ranks_per_host": 2, "calls": 4}
    every = simulate_collective(QUIET, MIB, **how)
    some = simulate_collective(QUIET, MIB, whole=3, **how)
    assert not some.failed
    for one, other in zip(every.calls, some.calls, strict=True):
        assert other.counts.packets == pytest.approx(one.counts.packets, rel=0.15)
        assert other.counts.local_bytes == pytest.approx(one.counts.local_bytes, rel=0.15)
    assert some.missing == every.missing == 0


def test_two_hosts_stand_for_hundreds() -> None:
    packet = payload_bytes(1500, 4)
    found = simulate_collective(QUIET, 300 * packet, hosts=300, whole=2, calls=2, settle=0)
    assert not found.failed
    assert found.calls[0].counts.packets >= 300 * 299 * 2


@pytest.mark.parametrize(
    ("network", "how", "why"),
    [
        (QUIET, {"whole": 3}, "3 hosts can't stand for 8"),
        (QUIET, {"whole": 1}, "1 hosts can't stand for 8"),
        (QUIET.with_port(1, up_mbit=10), {"whole": 2}, "network that is the same everywhere"),
        (QUIET, {"whole": 2, "collective": "broadcast"}, "hosts don't do alike in broadcast"),
        (QUIET, {"whole": 2, "nbytes": 20_000}, "can't be cut into whole packets"),
    ],
)
def test_hosts_that_are_not_alike_stand_for_nobody(
    network: Network, how: dict[str, Any], why: str
) -> None:
    with pytest.raises(NotAlikeError, match=why):
        simulate_collective(network, **{"nbytes": MIB, "hosts": 8, **how})


PEAK = """
import resource
from tests.simulate.test_collective import MIB, QUIET, simulate_collective
assert not simulate_collective(QUIET, 25 * MIB, hosts=64, calls=1, settle=0).failed
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_64_whole_hosts_take_less_than_4_gib() -> None:
    command = [sys.executable, "-c", PEAK]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) << 10 < 4 << 30


def test_how_many_hosts_stand_for_all() -> None:
    assert usual_whole(32, 1) is None
    assert usual_whole(8, 8) is None
    assert usual_whole(64, 1) == 8
    assert usual_whole(128, 1) == 8
    assert usual_whole(256, 1) == 4
    assert usual_whole(1024, 1) == 2
    assert usual_whole(64, 8) == 2
    assert usual_whole(999, 1) == 3
    assert usual_whole(100, 1) == 5
    assert usual_whole(101, 1) is None


def test_what_a_link_drops_at_its_own_rate_is_counted_by_itself() -> None:
    slow = Network(link=Link(delay_ms=5, rate_mbit=20, queue_packets=4))
    found = simulate_collective(slow, MIB, calls=2, settle=0)
    assert sum(call.counts.dropped_link for call in found.calls) > 0
    assert dropped(found) == 0
    ports = replace(QUIET, port=Port(up_mbit=20, down_mbit=20, queue_packets=4))
    other = simulate_collective(ports, MIB, calls=2, settle=0)
    assert dropped(other) > 0
    assert all(call.counts.dropped_link == 0 for call in other.calls)


def test_a_link_s_queue_holds_packets_of_the_network_s_size() -> None:
    """64 of them, where nothing is said: 25 ms of 1 Mbit/s hold two."""
    for mtu in (1500, 9000):
        rate = link_fields(Link(rate_mbit=1), mtu)["rate"]
        assert rate["queue_bytes"] == 64 * (mtu + ETHERNET_BYTES)


def test_a_link_s_policer_is_refused() -> None:
    network = Network(link=Link(rate_mbit=10, policer_ms=5))
    with pytest.raises(OptionError, match="policers at ports alone"):
        simulate_collective(network, MIB)


def test_tcp_alone_fills_its_link_and_flows_share_it() -> None:
    flows = [Flows("cubic", 2, (0, 1)), Flows("reno", 1, (2, 3)), Flows("cubic", 1, (3, 2), 0.2)]
    topology = Topology.of_labels(range(4), [0] * 4)
    with Hosts(QUIET, topology, Options(), grain=1e-4) as hosts:
        hosts.add_tcp(flows)
        hosts.run(hosts.now + 5)
        begun = hosts.tcp()
        hosts.run(hosts.now + 10)
        one, two, reno, pauses = (
            now.since(then).mbit for now, then in zip(hosts.tcp(), begun, strict=True)
        )
        counts = hosts.counts()
    most = 200 * 1448 / (1500 + ETHERNET_BYTES)  # without headers
    assert 0.95 * most < one + two < 1.01 * most
    assert min(one, two) > most / 4
    assert 0.9 * most < reno < 1.01 * most
    assert most / 20 < pauses < most / 5
    assert counts.dropped_up == counts.dropped_down == 0  # none of the engines'


def test_tcp_beside_sealed_packets_is_refused() -> None:
    with pytest.raises(OptionError, match="beside sealed packets"):
        simulate_collective(QUIET, MIB, tcp=[Flows("cubic")], secret=Secret.of(b"any"))


@pytest.mark.parametrize("kind", ["reno", "cubic"])
def test_tcp_on_a_path_that_loses_nothing_sends_a_receiver_s_window(kind: str) -> None:
    topology = Topology.of_labels(range(2), [0] * 2)
    with Hosts(Network(link=Link(delay_ms=10)), topology, Options(), grain=1e-4) as hosts:
        hosts.add_tcp([Flows(kind)])
        hosts.run(hosts.now + 1)
        (flow,) = hosts.tcp()
    assert flow.resent == 0
    assert 0.3 * 50 * 65536 * 1448 < flow.bytes < 50 * 65536 * 1448, "slow start, then full"


def test_a_job_beside_tcp_shares_the_link_with_it() -> None:
    found, again = (
        simulate_collective(QUIET, 4 * MIB, hosts=2, calls=4, tcp=[Flows("cubic")]) for _ in "ab"
    )
    assert found == again
    assert not found.failed
    (flow,) = found.tcp
    assert flow.seconds == pytest.approx(sum(call.seconds for call in found.steady))
    job, tcp = 1 / found.ratio, flow.mbit / 200
    assert job > 0.2
    assert tcp > 0.05
    assert 0.7 < job + tcp < 1
    assert found.seconds > 1.1 * simulate_collective(QUIET, 4 * MIB, hosts=2, calls=4).seconds


def test_tcp_that_a_simulation_does_not_have_is_refused() -> None:
    with pytest.raises(OptionError, match="no TCP 'bbr'; wanted reno or cubic"):
        simulate_collective(QUIET, MIB, tcp=[Flows("bbr")])
    with pytest.raises(NotAlikeError, match="beside TCP"):
        simulate_collective(QUIET, MIB, hosts=4, whole=2, tcp=[Flows("cubic")])

"""The laboratory as data: what networks can be, what they become, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lossycoll.errors import LabError, LabPermissionError, LossyError, OptionError
from lossycoll.lab import (
    PROFILES,
    Lab,
    Link,
    Network,
    Port,
    backends,
    counters,
    netem,
    network_io,
    nft,
    verify,
)
from lossycoll.lab.backends import choose, missing
from lossycoll.lab.counters import QueueCounts
from lossycoll.lab.job import Ended, rank_environment
from lossycoll.lab.network import changed, queue_bytes
from lossycoll.lab.switch import why
from lossycoll.lab.tcp import Flows, placed


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Link(loss=1.1), "link's loss is 1.1, wanted a fraction, 0 to 1"),
        (lambda: Link(loss=-0.1), "loss is -0.1"),
        (lambda: Link(loss=float("nan")), "loss is nan"),
        (lambda: Link(loss=True), "loss is True"),
        (lambda: Link(loss="much"), "loss is 'much'"),
        (lambda: Link(burst=0.5), "burst is 0.5, wanted 1 or more"),
        (lambda: Link(loss=0.9, burst=2), "burst is 2, wanted at least 9 for a loss of 0.9"),
        (lambda: Link(delay_ms=-1), "delay_ms is -1"),
        (lambda: Link(delay_ms=float("inf")), "delay_ms is inf"),
        (lambda: Link(delay_ms=1, jitter_ms=2), "jitter_ms is 2, wanted at most delay_ms, 1"),
        (lambda: Link(reorder=2), "reorder is 2"),
        (lambda: Link(duplicate=-1), "duplicate is -1"),
        (lambda: Link(rate_mbit=0), "rate_mbit is 0"),
        (lambda: Link(queue_packets=0), "queue_packets is 0"),
        (lambda: Port(up_mbit=-5), "up_mbit is -5"),
        (lambda: Port(queue_ms=0), "queue_ms is 0"),
        (lambda: Port(queue_ms=5, queue_packets=5), "either queue_packets or queue_ms"),
        (lambda: Port(up_mbit=5, queue_ms=5, policer_ms=5), "either queue_ms or policer_ms"),
        (lambda: Port(policer_ms=5), "policer_ms is 5, wanted a rate that it polices, too"),
        (lambda: Link(rate_mbit=5, policer_ms=0), "policer_ms is 0, wanted 0.001 to 60000 ms"),
        (lambda: Link(spread_ms=-1), "spread_ms is -1"),
        (lambda: Network(congestion="cubic; reboot"), "congestion is 'cubic; reboot', wanted"),
        (lambda: Network(congestion="a" * 16), "wanted a name such as cubic, reno or bbr"),
        (lambda: Flows("reno", 0), "TCP flows is 0"),
        (lambda: Flows("reno", share=0), "share of the time is 0, wanted 0.001 to 1"),
        (lambda: placed([Flows("reno", 1, (0, 2))], Network()), "host is 2"),
        (lambda: placed([Flows("reno", 40), Flows("reno", 40)], Network()), "flows is 80"),
        (lambda: Network(hosts=1), "hosts is 1, wanted a whole number from 2 to 64"),
        (lambda: Network(hosts=65), "hosts is 65"),
        (lambda: Network(hosts=2.0), "hosts is 2.0"),
        (lambda: Network(mtu=575), "mtu is 575, wanted a whole number from 576 to 65521"),
        (lambda: Network(mtu=65536), "mtu is 65536"),
        (lambda: Network(seed=-1), "seed is -1"),
        (lambda: Network(sites=0), "sites is 0, wanted a whole number from 1 to 64"),
        (lambda: Network(sites=3, hosts=22), "hosts is 22, wanted a whole number from 1 to 21"),
        (lambda: Network(ranks=0), "ranks is 0, wanted a whole number from 1 to 64"),
        (lambda: Network(ranks=(2, 0)), "ranks is 0"),
        (lambda: Network(sites=2, ranks=(3, 2)), "ranks is (3, 2), wanted one number, or one for"),
        (lambda: Network(sites=2, links={(0, 4): Link()}), "host is 4"),
        (lambda: Network().with_wan(speed=1), "neither links nor gateways have a speed"),
        (lambda: network_io.wan(Network(), "nowhere,loss=1%"), "no profile is called 'nowhere'"),
        (lambda: network_io.wan(Network(), "rate=1x"), "rate is '1x', wanted a number, and one of"),
        (lambda: Network(links={(0, 2): Link()}), "host is 2, wanted a whole number from 0 to 1"),
        (lambda: Network(links={(1, 1): Link()}), "two hosts that differ"),
        (lambda: Network(ports={-1: Port()}), "host is -1"),
        (lambda: Network().with_link((0, 1), los=1), "a link has no los"),
        (lambda: Network().with_port(0, rate=1), "a port has no rate"),
        (lambda: Network().with_parts(speed=1), "have a speed"),
        (lambda: Lab("cloudy"), "no profile is called 'cloudy'; did you mean cloud?"),
        (lambda: network_io.from_data([]), "a network is 'list'"),
        (lambda: network_io.from_data({"links": {"0:1": {}}}), "SENDER-RECEIVER"),
        (lambda: network_io.from_data({"host": 3}), "a network has no host"),
        (lambda: network_io.from_data({"link": 3}), "wanted an object"),
        (lambda: network_io.values("loss"), "NAME=VALUE"),
        (lambda: network_io.values("loss=x"), "loss is 'x', wanted a number"),
    ],
)
def test_refuses(make: Any, complaint: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert complaint in str(caught.value)


def test_what_is_wanted_of_a_rank_and_what_it_is_called() -> None:
    variables = rank_environment(2, Network(hosts=4), 4, "10.77.0.1")
    wanted = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1"}
    assert wanted.items() <= variables.items()
    assert "LOSSYCOLL_SITE" not in variables
    # Otherwise each start would tell of the namespaces that keep hosts from sharing memory.
    assert variables["LOSSYCOLL_HOST"] == "host2"
    assert variables["LOSSYCOLL_INTERFACE"] == variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [Ended(0, code).status for code in (0, 3, -9)] == [0, 3, 137]


def test_ranks_have_a_place() -> None:
    network = Network(sites=2, hosts=2, ranks=(3, 2, 1, 2))
    assert (network.total_hosts, network.world, network.has_levels) == (4, 8, True)
    places = [network.place_of(rank) for rank in range(8)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert [network.site_of(host) for host in range(4)] == [0, 0, 1, 1]
    assert [list(network.hosts_of(site)) for site in (0, 1)] == [[0, 1], [2, 3]]
    assert not Network(hosts=4).has_levels
    assert Network(sites=2, hosts=1).has_levels
    assert Network(ranks=2).has_levels


def test_ranks_are_told_their_place() -> None:
    network = Network(sites=2, hosts=2, ranks=(3, 2, 1, 2))
    last = rank_environment(7, network, 8, "10.77.0.1")
    wanted = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "LOSSYCOLL_SITE": "site1"}
    wanted |= {"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4", "ROLE_RANK": "7"}
    assert wanted.items() <= last.items()
    # The first four ranks alone: three of a host and one of two.
    some = rank_environment(3, network, 4, "10.77.0.1")
    wanted = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOSSYCOLL_SITE": "site0"}
    assert (wanted | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}).items() <= some.items()


def test_between_sites_is_another_network() -> None:
    network = Network(
        sites=2,
        link=Link(delay_ms=1),
        wan=Link(loss=0.1),
        links={(0, 1): Link(loss=0.3), (0, 2): Link(loss=0.2)},
    )
    assert network.total_hosts == 4
    assert network.link_of(1, 0) == network.link_of(3, 2) == Link(delay_ms=1)
    assert network.link_of(1, 2) == network.link_of(3, 0) == Link(loss=0.1)
    inside, outside = network.with_link(None, burst=2), network.with_wan(burst=2, rate_mbit=5)
    assert [inside.link_of(0, 1).burst, inside.link_of(2, 3).burst] == [2, 2]
    assert [inside.link_of(0, 2).burst, inside.link_of(1, 2).burst] == [1, 1]
    assert [outside.link_of(0, 1).burst, outside.link_of(2, 3).burst] == [1, 1]
    assert [outside.link_of(0, 2).burst, outside.link_of(1, 2).burst] == [2, 2]
    shaped = network.with_wan(up_mbit=10, queue_ms=3)
    assert (shaped.gateway, shaped.port) == (Port(up_mbit=10, queue_ms=3), Port())
    assert not Network(sites=2, gateway=Port(up_mbit=1)).only_loses
    assert not Network(sites=2, wan=Link(delay_ms=1)).only_loses
    assert Network(sites=2, wan=Link(loss=0.1)).only_loses


def test_short_texts_have_units() -> None:
    read = network_io.values("loss=1%, delay=20ms,jitter=500us,hold=1s,rate=1g,up=40m,down=200k")
    assert network_io.values("spread=2ms,policer=0.1s") == {"spread_ms": 2, "policer_ms": 100}
    assert read == pytest.approx(
        {
            "loss": 0.01,
            "delay_ms": 20,
            "jitter_ms": 0.5,
            "hold_ms": 1000,
            "rate_mbit": 1000,
            "up_mbit": 40,
            "down_mbit": 0.2,
        }
    )
    assert network_io.values("loss=0.1,delay_ms=5,queue_packets=7,rate=none") == {
        "loss": 0.1,
        "delay_ms": 5,
        "queue_packets": 7,
        "rate_mbit": None,
    }
    wide = network_io.wan(Network(sites=2), "cross-dc,rate=200,loss=2%")
    assert wide.wan == changed(PROFILES["cross-dc"].network.link, loss=0.02)
    assert wide.gateway == Port(up_mbit=200, down_mbit=200, queue_ms=10)
    assert (wide.link, wide.port) == (Link(), Port())


def test_what_crosses_edges_is_counted_once() -> None:
    sent = {(a, b): QueueCounts(10**a, 10**b) for a in range(3) for b in range(3) if a != b}
    hosts, sites = counters.crossing(sent, [0, 1, 2]), counters.crossing(sent, [0, 0, 1])
    assert [(one.up.packets, one.up.bytes) for one in hosts] == [(2, 110), (20, 101), (200, 11)]
    assert [(one.down.packets, one.down.bytes) for one in hosts] == [(110, 2), (101, 20), (11, 200)]
    assert [(one.up.packets, one.up.bytes) for one in sites] == [(11, 200), (200, 11)]
    assert [(one.down.packets, one.down.bytes) for one in sites] == [(200, 11), (11, 200)]


def test_changes_reach_what_they_name() -> None:
    network = Network(hosts=3, link=Link(loss=0.1), links={(0, 1): Link(delay_ms=5)})
    all_of_them = network.with_link(None, loss=0.2)
    assert all_of_them.link_of(1, 2) == Link(loss=0.2)
    assert all_of_them.link_of(0, 1) == Link(loss=0.2, delay_ms=5)
    one = network.with_link((2, 1), burst=3)
    assert (one.link_of(2, 1), one.link_of(1, 2)) == (Link(loss=0.1, burst=3), Link(loss=0.1))
    both = network.with_parts(hosts=2, delay_ms=7, up_mbit=10, queue_ms=3)
    assert (both.hosts, both.link_of(0, 1).delay_ms) == (2, 7)
    assert both.port_of(1) == Port(up_mbit=10, queue_ms=3)
    # One way to give a queue replaces the other.
    assert both.with_port(0, queue_packets=9).port_of(0).queue_ms is None
    assert network.with_port(1, down_mbit=1).port_of(0) == Port()
    assert [n.only_loses for n in (Network(link=Link(loss=0.1, burst=2)), network, both)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.3, 0.5])
@pytest.mark.parametrize("burst", [1.0, 2.0, 8.0])
def test_chances_make_the_loss_and_the_burst(loss: float, burst: float) -> None:
    begin, go_on = Link(loss=loss, burst=burst).chances
    # The share of a two-state chain, and the mean time in its bad state.
    assert begin / (begin + 1 - go_on) == pytest.approx(loss)
    assert 1 / (1 - go_on) == pytest.approx(Link(loss=loss, burst=burst).mean_burst)


def test_chances_at_the_ends() -> None:
    assert Link().chances == (0, 0)
    assert Link(loss=1).chances == Link(loss=1, burst=4).chances == (1, 1)


def test_length_of_queues() -> None:
    assert queue_bytes(8, Port(queue_ms=10), 1500) == 10_000
    assert queue_bytes(8, Port(queue_packets=5), 1486) == 7500
    assert queue_bytes(0.01, Port(queue_ms=1), 1500) == 2 * 1514  # or nothing would ever pass
    assert queue_bytes(8, Port(up_mbit=8, policer_ms=10), 1500) == 10_000
    # Where nothing is said: a time of the rate, but some packets at least.
    assert queue_bytes(1000, Link(), 1500) == 3_125_000
    assert queue_bytes(8, Port(), 1486) == 64 * 1500


def test_a_policer_stands_where_a_queue_would() -> None:
    port = Port(up_mbit=100, queue_ms=20)
    policed = changed(port, policer_ms=5)
    assert policed == Port(up_mbit=100, policer_ms=5)
    assert changed(policed, queue_packets=9) == Port(up_mbit=100, queue_packets=9)
    assert changed(policed, policer_ms=None) == Port(up_mbit=100)
    assert changed(port, up_mbit=10).queue_ms == 20


def test_the_first_backend_that_can_make_every_network_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "missing", lambda name: "")
    plain, lossy = Network(), Network(link=Link(loss=0.1))
    policed = Network(port=Port(up_mbit=10, policer_ms=5))
    late = Network(link=Link(delay_ms=1))
    assert choose(plain, late) == "netem"
    assert choose(plain, policed) == "switch"
    monkeypatch.setattr(backends, "missing", lambda name: name == "netem" and "not there")
    assert [choose(lossy), choose(lossy, late)] == ["nft", "switch"]
    assert choose(policed, name="switch") == "switch"
    for name, network, complaint in (
        ("netem", policed, "netem makes no policers"),
        ("nft", late, "nft makes loss alone"),
    ):
        with pytest.raises(LabError, match=complaint):
            choose(plain, network, name=name)


@pytest.mark.parametrize("link", [Link(loss=0.001), Link(loss=0.05), Link(loss=0.02, burst=5)])
def test_patterns_lose_what_was_asked(link: Link) -> None:
    one = nft.draw(link, 1, (0, 1))
    lost = sum(last - first + 1 for first, last in one.runs)
    assert lost / one.period == pytest.approx(link.loss, rel=1e-3)
    lengths = [last - first + 1 for first, last in one.runs]
    assert statistics.mean(lengths) == pytest.approx(link.mean_burst, rel=0.1)
    edges = [edge for run in one.runs for edge in run]
    assert edges == sorted(edges)
    assert all(b - a >= 2 for (_, a), (b, _) in zip(one.runs, one.runs[1:], strict=False))
    assert edges[-1] < one.period
    assert one == nft.draw(link, 1, (0, 1)) != nft.draw(link, 1, (1, 0))


def test_patterns_at_the_ends() -> None:
    assert nft.draw(Link(), 1, (0, 1)).runs == ()
    assert nft.draw(Link(loss=1), 1, (0, 1)) == nft.Pattern(1, ((0, 0),))


def test_files_say_the_same_again(tmp_path: Path) -> None:
    network = Network(
        hosts=3,
        link=Link(loss=0.1, burst=2),
        links={(0, 1): Link(delay_ms=5)},
        ports={2: Port(up_mbit=10, queue_ms=4)},
        mtu=9000,
        seed=7,
        congestion="bbr",
        sites=2,
        ranks=(1, 2, 3, 4, 5, 6),
        wan=Link(delay_ms=20),
        gateway=Port(up_mbit=100),
    )
    path = tmp_path / "net.json"
    path.write_text(json.dumps(network_io.as_data(network)))
    assert network_io.load(path) == network
    path.write_text('{"hosts": 4, "link": {"loss": 0.1}, "links": {"0-3": {"delay_ms": 9}}}')
    read = network_io.load(path)
    assert read.link_of(0, 3) == Link(loss=0.1, delay_ms=9)
    for text, complaint in (("{", "isn't json"), ('{"mtu": 9}', "mtu is 9")):
        path.write_text(text)
        with pytest.raises(OptionError, match=complaint):
            network_io.load(path)
    for coding in ("utf-16", "latin-1"):
        path.write_bytes('{"congestion": "größe"}'.encode(coding))
        with pytest.raises(OptionError, match="isn't text in UTF-8"):
            network_io.load(path)
    with pytest.raises(OptionError, match="No such file"):
        network_io.load(tmp_path / "none.json")


def test_profiles_say_where_they_come_from() -> None:
    wanted = {"clean", "lan-incast", "cloud", "cross-dc", "two-sites", "transatlantic", "home"}
    assert set(PROFILES) == wanted
    for one in PROFILES.values():
        assert one.meaning
        assert one.source
        assert one.assumed
        assert network_io.from_data(network_io.as_data(one.network)) == one.network


def test_netem_is_given_the_same() -> None:
    def said(link: Link) -> str:
        return " ".join(netem.link_arguments(link, 1500))

    # A rate is always named, or a queue would keep the one that it had.
    assert said(Link()) == "limit 1000000 rate 0bit"
    assert "delay 10ms 2ms loss random 1% " in said(Link(loss=0.01, delay_ms=10, jitter_ms=2))
    assert "loss gemodel 0.2525253% 25% " in said(Link(loss=0.01, burst=4))
    assert "duplicate 20% reorder 10% " in said(Link(delay_ms=1, reorder=0.1, duplicate=0.2))
    assert netem.rate_arguments(None, Port(), 1500)[-2:] == ["rate", "0bit"]
    assert netem.rate_arguments(0.5, Port(), 1500)[-2:] == ["rate", "0.5mbit"]
    # Its limit holds what is delayed, too: 10 ms of 100 Mbit/s is 83 packets.
    assert said(Link(rate_mbit=100, delay_ms=10, queue_packets=5)) == (
        "limit 88 delay 10ms rate 100000000bit"
    )
    assert said(Link(delay_ms=10, spread_ms=4)) == "limit 1000000 delay 12ms 2ms rate 0bit"
    for link, complaint in (
        (Link(reorder=0.1), "only where there is a delay"),
        (Link(delay_ms=5, jitter_ms=1, spread_ms=1), "either a jitter or a spread"),
        (Link(rate_mbit=1, policer_ms=1), "no policers"),
    ):
        with pytest.raises(LabError, match=complaint):
            netem.link_arguments(link, 1500)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "infms", "1e400s"])
def test_a_quantity_is_finite(text: str) -> None:
    with pytest.raises(OptionError, match="wanted a finite number"):
        network_io.quantity("delay", "delay_ms", text)


def test_a_link_from_which_no_ping_returned_has_no_round_trip_in_json() -> None:
    """JSON has no infinity, and most readers refuse it."""
    none = verify.Flow(100, 0, 100, 1, 0, 0, 0, 0.0, 0)
    row = verify.LinkCheck((0, 1), Link(loss=1), 0.0, 0.0, math.inf, none, none)
    said = json.loads(json.dumps(row.as_json(), allow_nan=False))
    assert said["round_trip"] is None
    assert said["complaints"] == row.complaints == []
    assert replace(row, round_trip=2.5).as_json()["round_trip"] == 2.5


def test_bounds_hold_what_chance_does() -> None:
    low, high = verify.bounds(Link(loss=0.01), 40_000)
    assert 0.0075 < low < 0.0085
    assert 0.0115 < high < 0.0125
    wide = verify.bounds(Link(loss=0.01, burst=8), 40_000)
    assert wide[0] < low < high < wide[1]
    assert verify.bounds(Link(), 1000) == (0, 0)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EPERM, LabPermissionError), (errno.ENOENT, LabError)]
)
def test_what_a_machine_lacks_is_said_with_a_way_out(code: int, kind: type[LossyError]) -> None:
    error = why("make a network namespace", code)
    assert type(error) is kind
    assert isinstance(error, PermissionError) is (kind is LabPermissionError)
    assert os.strerror(code) in str(error)
    assert "LOSSYCOLL_INJECT=loss=0.01" in str(error)


def test_an_interpreter_that_this_user_may_not_run_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of root, say, to anybody else."""
    file = tmp_path / "python"
    file.touch(0o600)
    monkeypatch.setattr(sys, "executable", str(file))
    missing.cache_clear()
    try:
        found = {one.name: one for one in backends.examine()}
        with pytest.raises(LabError, match=r"can't run .*/python as user \d+: Permission denied"):
            Lab().__enter__()
    finally:
        missing.cache_clear()
    assert not backends.can_run(list(found.values()))
    for name in ("interpreter", "backend switch"):
        assert not found[name].good
        assert f"can't run {file} as user" in found[name].found


def test_a_laboratory_must_be_started() -> None:
    with pytest.raises(LabError, match="isn't started"):
        Lab().counters()
    with pytest.raises(OptionError, match="no backend is called 'wire'"), Lab(backend="wire"):
        pass

"""Folding: of hosts that all do alike, the first ones stand for the others (native/sim/fold.h).

Where a network is the same everywhere, and plans that are moved along by some hosts are plans of
other ranks, what rank ``r`` does among all is what rank ``r + n * real`` does. So ``real`` ranks
are simulated, each with all its peers, and a packet to any other rank goes to the one that stands
for it. What is lost of the truth is that hosts which stand for each other aren't independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from ..errors import OptionError
from ..plan import Plan, Topology, draw_order
from ..plan.model import Own


class NotAlikeError(OptionError):
    """Hosts can't stand for others."""


@dataclass(frozen=True)
class Fold:
    """The simulated hosts, and how slot numbers change when all ranks are moved along.

    The first ``fixed`` numbers stay. The others are blocks of ``block`` numbers, and in each of
    them all go around: by ``step`` for each host where hosts own segments in the order of their
    numbers.
    """

    hosts: int  # that are simulated
    real: int  # their ranks
    fixed: int
    block: int
    step: int

    def step_of(self, stride: int) -> int:
        """Increase of slot numbers over ``real`` ranks; ``stride``: of :func:`alike`."""
        return self.hosts * self.step * pow(stride, -1, self.block) % self.block

    def before(self, slot: int, images: int, stride: int) -> int:
        """The slot's number at the rank ``images * real`` ranks before."""
        if slot < self.fixed:
            return slot
        inside = (slot - self.fixed) % self.block
        return slot - inside + (inside - images * self.step_of(stride)) % self.block


def stride_of(seed: int, group: int, op: int, hosts: int) -> int:
    """From one host to the next in the order of an operation, drawn of all that reach each host."""
    coprime = [n for n in range(1, max(2, hosts)) if gcd(n, hosts) == 1]
    return coprime[draw_order(seed, group, op, len(coprime))[0]]


def alike(topology: Topology, stride: int) -> tuple[int, ...]:
    """An order of the ranks that is the same one from any host on, but for where it begins."""
    members = topology.members_of_hosts
    hosts = [number * stride % topology.n_hosts for number in range(topology.n_hosts)]
    return tuple([rank for host in hosts for rank in members[host]])


def fold_of(plan_of: Callable[[int], tuple[Plan, int]], topology: Topology, hosts: int) -> Fold:
    """Return the fold to the first ``hosts`` hosts; NotAlikeError if plans are not alike.

    ``plan_of`` has any rank's plan in the first operation, and the stride of its order, which all
    have. The plan of each rank of the first host is compared with those of two ranks that it would
    stand for.
    """
    per_host = topology.world // topology.n_hosts
    real, images = hosts * per_host, topology.n_hosts // hosts
    numbers = [rank + image * real for rank in range(per_host) for image in {0, 1, images - 1}]
    plans = {number: plan_of(number) for number in numbers}
    stride = plans[0][1]
    folds = [Fold(hosts, real, fixed, topology.n_hosts, 1) for fixed in range(per_host + 1)]
    for fold in (*folds, Fold(hosts, real, 0, topology.world, per_host)):
        if all(
            _is_image(plans[rank][0], plans[rank + image * real][0], fold, image, stride)
            for rank in range(per_host)
            for image in {1, images - 1}
        ):
            return fold
    plan = plans[0][0]
    raise NotAlikeError(
        f"hosts don't do alike in {plan.collective} by {plan.algorithm} of "
        f"{plan.in_elements} elements: simulate all of them whole"
    )


def _is_image(plan: Plan, image: Plan, fold: Fold, images: int, stride: int) -> bool:
    """True if ``image`` becomes ``plan`` when its ranks are moved back."""
    before = _named(
        image,
        lambda rank: (rank - images * fold.real) % plan.world,
        lambda slot: fold.before(slot, images, stride),
    )
    return before == _named(plan, int, int)  # int names each as it is


def _named(plan: Plan, rank: Callable[[int], int], number: Callable[[int], int]) -> set[object]:
    """All that matters to when packets are sent, with other names."""
    return {
        (
            number(slot.number),
            slot.length,
            frozenset(map(rank, slot.sources)),
            frozenset((rank(dest.peer), number(dest.slot)) for dest in slot.dests),
            slot.combine,
            slot.own,
            number(slot.feed) if slot.own is Own.SLOT else 0,
            slot.target,
            slot.level,
        )
        for slot in plan.slots
    }

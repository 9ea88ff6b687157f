"""What one of eight peers costs that lies about its values, with ``max_norm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from lossycoll import MoshpitAverager, MoshpitSGD, OptionError, RendezvousError
from tests.train.moshpit.test_people import Make, at_once, made
from tests.train.moshpit.test_sgd import model

__all__ = ["made"]
PEERS: Final = 8
STEPS: Final = 24
EVERY: Final = 4
NOISE: Final = 0.3
MOST: Final = 1.1
"""Times the loss without a liar. The goal is 1.02, which so few steps of one seed can't resolve: a
peer whose values are refused is one fewer that trains."""
LIES: Final[dict[str, Callable[[Any], Any]]] = {
    "none": lambda values: values,
    "x1000": lambda values: 1000 * values,
    "negative": lambda values: -values,
}


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=draw)
    noise = NOISE * torch.randn(rows, 1, generator=draw)
    return inputs, torch.tanh(inputs[:, :3].sum(1, keepdim=True)) + noise


def loss_with(
    made: Make, average: str, lie: str, max_norm: float | None, steps: int = STEPS
) -> tuple[float, set[int]]:
    """Of the honest peers' models, on data that nobody has seen; and whose values they refused."""
    swarms, models = made(PEERS), [network() for _ in range(PEERS)]
    refused: set[int] = set()

    def train(number: int) -> None:
        own = models[number]
        averager = MoshpitAverager(swarms[number], own.parameters(), max_norm=max_norm)
        plain = averager._member.average

        def lies(values: Any, *given: Any) -> Any:
            honest = values.copy()
            values[:] = LIES[lie](values)
            report = plain(values, *given)
            values[:] = honest
            return report

        if number == 0 and lie != "none":
            averager._member.average = lies  # type: ignore[method-assign,assignment]
        optimizer = MoshpitSGD(
            own,
            torch.optim.Adam(own.parameters(), lr=0.003),
            averager,
            every=EVERY,
            average=average,
            timeout=30.0,
        )
        averager.wait_for(PEERS)
        for step in range(steps):
            inputs, targets = data(1000 * number + step, 64)
            optimizer.zero_grad()
            nn.functional.mse_loss(own(inputs), targets).backward()
            report = optimizer.step(weight=64)
            if report is not None and number:
                assert (report.failure, len(report.members)) == ("", PEERS)
                refused.update(report.refused)

    found_by = at_once(*(lambda n=n: train(n) for n in range(PEERS)))
    assert found_by == [None] * PEERS
    inputs, targets = data(-1, 4096)
    with torch.no_grad():
        found = [float(nn.functional.mse_loss(one(inputs), targets)) for one in models[1:]]
    return sum(found) / len(found), refused


@pytest.mark.parametrize(
    ("average", "max_norm"),
    [("parameters", 2.0), pytest.param("gradients", 3.0, marks=pytest.mark.long)],
)
def test_what_a_liar_costs(average: str, max_norm: float, made: Make) -> None:
    """A tenth of the loss at most, and not ten times it; without a liar the bound costs at most
    0.2%."""
    trained, _ = loss_with(made, average, "none", None)
    if average == "parameters":  # Adam takes gradients of any size
        lost, _ = loss_with(made, average, "x1000", None, steps=8)
        assert not lost < 10 * trained, "one that lies is harmless"
    bounded, refused = loss_with(made, average, "none", max_norm)
    assert bounded <= 1.002 * trained
    assert refused == set()
    bounded, refused = loss_with(made, average, "x1000", max_norm)
    assert bounded <= MOST * trained
    assert 0 in refused
    bounded, _ = loss_with(made, average, "negative", max_norm)
    assert bounded <= MOST * trained


def test_norms_that_cannot_be(made: Make) -> None:
    swarms = made(2)
    for wrong in (0.0, 1.0, -3.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match=r"max_norm is .*, wanted above 1 and below"):
            MoshpitAverager(swarms[0], model().parameters(), max_norm=wrong)
    with pytest.raises(OptionError, match="max_norm is 3 and the wire int8"):
        MoshpitAverager(swarms[0], model().parameters(), max_norm=3.0, wire="int8")
    MoshpitAverager(swarms[0], model().parameters(), max_norm=3.0)
    with pytest.raises(RendezvousError, match=r"max_norm=None, wanted 3\.0"):
        MoshpitAverager(swarms[1], model().parameters())

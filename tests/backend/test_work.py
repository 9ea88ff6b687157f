"""Works that count as one, and how errors pass through futures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend.work import LossyWork, ManyWork, value_or_raise
from lossycoll.errors import LossyError


class Fake(LossyWork):
    """A work that is done, or fails."""

    def __init__(self, log: list[Any], error: LossyError | None = None, done: bool = True) -> None:
        super().__init__()
        self._result = [torch.zeros(1)]
        self._log, self._error, self._done = log, error, done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._log.append((self, timeout))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def exception(self) -> LossyError | None:
        return self._error

    def get_future(self) -> Any:
        source: torch.futures.Future[Any] = torch.futures.Future()
        future = source.then(value_or_raise)
        source.set_result(self._error or self.result())
        return future


def test_all_are_waited_for_in_order_and_each_for_the_timeout() -> None:
    log: list[Any] = []
    works = [Fake(log), Fake(log)]
    result = [torch.ones(2)]
    many = ManyWork(works, result)
    assert many.wait()
    assert many.wait(timedelta(seconds=3))
    assert log == [(works[0], None), (works[1], None), *((w, timedelta(seconds=3)) for w in works)]
    assert many.is_success()
    assert many.result() is result
    assert many.get_future().wait() is not None


def test_the_first_error_is_raised_by_wait_and_by_the_future() -> None:
    log: list[Any] = []
    many = ManyWork(
        [Fake(log), Fake(log, LossyError("first")), Fake(log, LossyError("second"))], []
    )
    with pytest.raises(LossyError, match="first"):
        many.wait()
    assert str(many.exception()) == "first"
    assert many.is_completed()
    assert not many.is_success()
    with pytest.raises(RuntimeError, match="LossyError: first"):
        many.get_future().wait()


def test_one_that_is_not_done_is_enough() -> None:
    assert not ManyWork([Fake([]), Fake([], done=False)], []).is_completed()
    assert ManyWork([], []).is_completed()
    assert ManyWork([], []).source_rank() == -1
    assert isinstance(ManyWork([], []), dist.Work)

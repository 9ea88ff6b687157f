"""A communication hook of DDP that remembers what gradients lose in few bits.

Rounded to few bits, a gradient loses what is smaller than half a step, in each step anew. Error
feedback adds what was lost to the next gradient, so that nothing is lost for good (Seide et al.,
Interspeech 2014; Karimireddy et al., arXiv 1901.09847: ``ef14`` in compress/error_memory.py).
"""

# Annotations are no text in this file: DDP compares the hook's with its own classes.
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import lossy, reliable
from lossycoll.plan import codec
from lossycoll.plan.rng import key_of
from lossycoll.runtime.engine.codecs import rounded
from lossycoll.train.common.collectives import sum_of

from .addends import addend

DOMAIN: Final = 0x66656564
"""Keeps these draws apart from all others ("feed")."""


class WireFeedbackState:
    """The arguments of :func:`wire_feedback_hook`, and what each parameter's gradient has lost.

    It takes a float32 tensor for each parameter. The rounding error is this rank's own, and not
    part of a checkpoint or a copy: without it a few steps are rounded as without feedback. It is in
    the unit of the gradients: when a GradScaler changes its scale, the next step's is off by as
    much. It is dropped for a parameter that no rank uses in a step (``find_unused_parameters``).
    """

    def __init__(
        self,
        wire: str = "int4/int8",
        *,
        wire_group: int = 128,
        wire_spikes: int = 0,
        wire_rounding: str = "nearest",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """State of the hook, for one model.

        Args:
            wire: Encoding of gradients in few bits, or two, of which the first is that
                of contributions. Feedback is of these: what means lose is not remembered, so they
                should have more bits.
            wire_group: Elements that share a grid, as the option.
            wire_spikes: Whether the ends of groups travel as floats, as the option.
            wire_rounding: Rounding mode of the encoding, as the option.
            group: The group to average over; None is the default group.

        Raises:
            OptionError: A value that isn't allowed, or a ``wire`` that isn't of few bits.
        """
        self.options: dict[str, Any] = {
            "wire": wire,
            "wire_group": wire_group,
            "wire_spikes": wire_spikes,
            "wire_rounding": wire_rounding,
        }
        checked = Options(**self.options)
        if checked.wire not in codec.FEW_BITS:
            raise OptionError(
                f"wire is {wire!r}, wanted an encoding of few bits, as int4 or int4/int8: of "
                f"others nothing need be remembered"
            )
        self.group = group
        self._encoding = codec.phases(checked.encoding)[0]
        self._lost: dict[Tensor, Tensor] = {}
        self._calls = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lost": {}}  # by parameters, which are others in a copy

    def _rounded(self, x: Tensor, rank: int) -> Tensor:
        """This rank's gradient, float32 (n,), as others decode it; draws depend on the rank."""
        self._calls += 1
        held = x.cpu()  # codecs work on host memory; what is there is itself
        out = torch.empty_like(held)
        seed = key_of(DOMAIN, rank, self._calls)
        rounded(self._encoding, held.data_ptr(), out.data_ptr(), len(x), seed)
        return out.to(x.device)

    def _take(self, whole: Tensor, parameters: list[Tensor]) -> None:
        """Adds what was lost to a bucket's gradients, float32 (n,), in order of ``parameters``."""
        for parameter, part in zip(parameters, _parts(whole, parameters), strict=True):
            if parameter in self._lost:
                part.add_(self._lost[parameter])

    def _remember(self, lost: Tensor, parameters: list[Tensor]) -> None:
        """Keeps what a bucket loses now.

        A group of which an element isn't finite has lost nothing: it would never be finite again.
        """
        lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for parameter, part in zip(parameters, _parts(lost, parameters), strict=True):
            self._lost[parameter] = part


def _parts(whole: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """Parts of a bucket by parameter. A bucket has complex gradients as pairs."""
    sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
    return torch.split(whole, sizes)


def wire_feedback_hook(
    state: WireFeedbackState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients in few bits, and adds what rounding takes from them to the next ones.

    Register it once, with a state of your own::

        state = lossycoll.WireFeedbackState("int4/int8")
        ddp.register_comm_hook(state, lossycoll.wire_feedback_hook)

    Gradients lose packets as without the hook, by the group's options. Over another backend, and
    for float64, it returns the plain mean. Where ranks share hosts, what is rounded is the sum of a
    host, and is not remembered. docs/wire.md says when to take it.

    Args:
        state: The encoding, and what is remembered.
        bucket: DDP's bucket of dense gradients, which are replaced by the means.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UnsupportedError: The gradients are sparse.
    """
    flat, group = addend(bucket, state.group, "wire_feedback_hook")
    if not isinstance(group, LossyProcessGroup) or flat.dtype is torch.float64:
        return sum_of(dist.all_reduce(flat, group=group, async_op=True))
    scope = reliable if group.lossy_options().delivery == "reliable" else lossy
    if group.lossy_topology().shares_hosts:
        with scope(**state.options):  # what is rounded is the sum of a host, which no rank sees
            return sum_of(dist.all_reduce(flat, group=group, async_op=True))
    parameters = bucket.parameters()
    whole = flat.float()  # the buffer itself, if it is of float32
    state._take(whole, parameters)
    sent = state._rounded(whole, dist.get_rank(group))
    state._remember(whole - sent, parameters)
    with scope(**state.options):
        done = sum_of(dist.all_reduce(sent, group=group, async_op=True))

    def back(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = flat
        return out.copy_(future.value())

    found: torch.futures.Future[torch.Tensor] = done.then(back)
    return found

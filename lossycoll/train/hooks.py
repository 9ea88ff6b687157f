"""Communication hooks for DistributedDataParallel."""

# Annotations are no text in this file: DDP compares the hook's with its own classes.

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.backend.work import value_or_raise
from lossycoll.errors import OptionError, UnsupportedError
from lossycoll.options.fields import Options
from lossycoll.options.scopes import lossy, reliable
from lossycoll.plan import codec
from lossycoll.plan.rng import key_of
from lossycoll.runtime.engine.codecs import rounded
from lossycoll.train.common.collectives import sum_of
from lossycoll.train.compress.arc_topk import ARCTopKState


def check_dense(gradients: Tensor, hook: str) -> None:
    """Raises UnsupportedError if a bucket's gradients are sparse; ``hook`` is the hook's name."""
    if gradients.layout is not torch.strided:
        raise UnsupportedError(
            f"{hook} got a gradient of {gradients.layout}, wanted dense ones: make embeddings "
            f"with sparse=False, or leave the hook out"
        )


def addend(
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    group: dist.ProcessGroup | None,
    hook: str,
) -> tuple[Tensor, dist.ProcessGroup | None]:
    """This rank's part of a bucket's mean, already divided, and the group to add it in.

    UnsupportedError, which names ``hook``: the gradients are sparse.
    """
    flat = bucket.buffer()
    check_dense(flat, hook)
    found = dist.group.WORLD if group is None else group
    flat.div_(dist.get_world_size(found))
    return flat, found


def _into(
    flat: Tensor, done: torch.futures.Future[Tensor], read: Callable[[Tensor], Tensor]
) -> torch.futures.Future[Tensor]:
    """A future of a bucket's buffer, once it has what is read of another one's."""
    out: torch.futures.Future[Tensor] = done.then(lambda future: flat.copy_(read(future.value())))
    return out


GOLDEN: Final = 0.6180339887498949  # (sqrt(5) - 1) / 2


def dispersing_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as DDP does, with each packet's elements scattered over the bucket.

    Register it once::

        ddp.register_comm_hook(None, lossycoll.dispersing_hook)

    No packet carries neighbouring elements, so the errors of a lost packet cancel: docs/quality.md
    has figures. The hook copies each bucket twice, and takes the memory of one more. Over another
    backend, or with reliable delivery, it returns the plain mean.

    Args:
        state: The group to average over; None is the default group.
        bucket: DDP's bucket of dense gradients, in which the mean is formed.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UnsupportedError: The gradients are sparse.
    """
    flat, group = addend(bucket, state, "dispersing_hook")
    if not isinstance(group, LossyProcessGroup) or group.lossy_options().delivery == "reliable":
        return sum_of(flat, group)
    packets = _prime_from(len(flat) / (group.block_bytes // flat.element_size()))
    sent = _interleaved(flat, packets)
    done = sum_of(sent, group)
    return _into(flat, done, lambda mean: _restored(mean, packets, len(flat)))


def _interleaved(flat: torch.Tensor, packets: int) -> torch.Tensor:
    """float (packets * n,): a packet has the elements k, k + packets, ... of ``flat``, with zeros
    behind its end; its place is :func:`_places` of k."""
    rows = -(-len(flat) // packets)
    padded = flat.new_zeros(rows * packets)
    padded[: len(flat)] = flat
    sent = flat.new_empty(packets, rows)
    sent[_places(packets).to(flat.device)] = padded.view(rows, packets).t()
    return sent.view(-1)


def _restored(sent: torch.Tensor, packets: int, length: int) -> torch.Tensor:
    """The ``length`` elements that :func:`_interleaved` was given."""
    at = _places(packets).to(sent.device)
    return sent.view(packets, -1).index_select(0, at).t().reshape(-1)[:length]


def _places(packets: int) -> torch.Tensor:
    """int64 (packets,): where each packet is sent.

    Packets that are d apart are sent the fractional part of 0.618 d of all apart: of all ratios the
    golden one keeps small d farthest apart. ``packets`` is prime, so each place is taken once.
    """
    return torch.arange(packets, device="cpu") * max(1, round(GOLDEN * packets)) % packets


def _prime_from(least: float) -> int:
    """The first prime from ``least`` on. Distances in matrices have small factors, and a packet
    would carry a whole column if its step had them as well."""
    number = max(2, int(least + 1))
    while any(number % factor == 0 for factor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


DOMAIN: Final = 0x66656564  # keeps these draws apart from all others ("feed")


class WireFeedbackState:
    """Arguments of :func:`wire_feedback_hook`, and the rounding error of each parameter's gradient.

    It takes a float32 tensor for each parameter. The rounding error is this rank's own, and not
    part of a checkpoint or a copy: after a restart, a few steps are rounded as without feedback.
    Nor is the group: a copy averages over the default group unless you set its ``group``. The error
    is in the gradients' unit: when a GradScaler changes its scale, the next step's feedback is
    wrong by that factor. It is dropped for a parameter that no rank uses in a step
    (``find_unused_parameters``).
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
        """Create the hook's state for one model.

        Args:
            wire: Encoding of gradients in few bits, or a pair, for contributions and for means.
                Feedback covers contributions only. The means' rounding error is not remembered, so
                means should have more bits.
            wire_group: Elements that share a grid, as the option.
            wire_spikes: Whether the ends of groups travel as floats, as the option.
            wire_rounding: Rounding mode of the encoding, as the option.
            group: The group to average over; None is the default group.

        Raises:
            OptionError: A value isn't allowed, or ``wire`` isn't an encoding of few bits.
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
        # The errors are by parameters, which are others in a copy.
        return self.__dict__ | {"_lost": {}, "group": None}

    def _encoded(self, whole: Tensor, parameters: list[Tensor], rank: int) -> Tensor:
        """A bucket's gradients, float32 (n,), and what they have lost before, as others decode
        them. What they lose now is remembered."""
        # A bucket has complex gradients as pairs.
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
            if parameter in self._lost:
                part.add_(self._lost[parameter])
        self._calls += 1
        held = whole.cpu()  # codecs work on host memory; what is there is itself
        out = torch.empty_like(held)
        seed = key_of(DOMAIN, rank, self._calls)  # draws depend on the rank
        rounded(self._encoding, held.data_ptr(), out.data_ptr(), len(whole), seed)
        sent = out.to(whole.device)
        # A group of which an element isn't finite has lost nothing: it would never be finite again.
        lost = (whole - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._lost.update(zip(parameters, torch.split(lost, sizes), strict=True))
        return sent


def wire_feedback_hook(
    state: WireFeedbackState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in few bits, and add their rounding error to the next step's gradients.

    Register it once, with a state of your own::

        state = lossycoll.WireFeedbackState("int4/int8")
        ddp.register_comm_hook(state, lossycoll.wire_feedback_hook)

    Gradients may lose packets by the group's options, as without the hook. Over another backend,
    and for float64, it returns the plain mean. Where ranks share hosts, the host's sum is rounded,
    and its rounding error is not remembered. docs/wire.md says when to use the hook.

    Args:
        state: Encoding, and the remembered rounding errors.
        bucket: DDP's bucket of dense gradients, which are replaced by the means.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UnsupportedError: The gradients are sparse.
    """
    flat, group = addend(bucket, state.group, "wire_feedback_hook")
    if not isinstance(group, LossyProcessGroup) or flat.dtype is torch.float64:
        return sum_of(flat, group)
    sent = flat
    if not group.lossy_topology().shares_hosts:  # else a host's sum is rounded, which no rank sees
        # The buffer itself, if it is of float32.
        sent = state._encoded(flat.float(), bucket.parameters(), dist.get_rank(group))
    scope = reliable if group.lossy_options().delivery == "reliable" else lossy
    with scope(**state.options):
        done = sum_of(sent, group)
    return done if sent is flat else _into(flat, done, lambda mean: mean)


def arc_topk_hook(
    state: ARCTopKState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients by ARC-Top-K: only the rows that a shared sketch shows to be largest.

    Register it once, with a state of your own::

        ddp.register_comm_hook(lossycoll.ARCTopKState(ratio=0.2), lossycoll.arc_topk_hook)

    On the CPU, a thread of the state compresses and sends a bucket while the backward pass
    continues. The call for the last bucket returns when all are complete, so that none of DDP's own
    collectives comes between them. Method and costs: docs/arc_topk.md; source: arXiv 2510.26709.

    Args:
        state: Arguments, the memory between steps, and the count of steps.
        bucket: DDP's bucket of dense gradients, of any shapes; they are replaced in place.

    Returns:
        A future of the bucket's buffer. It raises the errors of :meth:`ARCTopKState.mean_`.

    Raises:
        UnsupportedError: The gradients are sparse.
        TrainingError: A parameter is not one of the state's ``named_parameters``.
    """
    flat = bucket.buffer()
    check_dense(flat, "arc_topk_hook")
    keys = state.keys(bucket.parameters())
    gradients, last = bucket.gradients(), bucket.is_last()
    # With its device it orders the streams of those who wait for it.
    devices = [] if flat.is_cpu else [flat.device]
    source: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    out = source.then(value_or_raise)

    def work() -> None:
        state.reduce(keys, gradients, flat)
        if last:
            state.iter += 1

    done = state._run(work, on_host=flat.is_cpu)
    done.add_done_callback(lambda ended: source.set_result(ended.exception() or flat))
    if last:
        wait([done])
    return out

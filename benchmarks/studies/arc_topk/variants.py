"""How gradients may travel, as data, and how a replica is made that sends them so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import lossycoll

ONE_BUCKET_MIB = 512
"""PowerSGD's hook issues a bucket's second sum from a callback: over gloo the order of several
buckets' sums would be a matter of luck."""


@dataclass(frozen=True)
class Variant:
    """``hook``: "" for DDP's own, "powersgd" or "arc", with ``how`` as arguments of its state.

    ``backend``: "gloo", or "lossy", where ``reliable`` says that nothing may be lost: by a group of
    its own, since PowerSGD's hook sums from callbacks, where no block of code reaches. ``wire``:
    that of the group, which PowerSGD's sums need; ARC-Top-K's state has its own.
    """

    hook: str
    backend: str
    how: Mapping[str, Any] = field(default_factory=dict)
    reliable: bool = False
    wire: str = "same"


def arc(ratio: float, backend: str, feedback: str = "ef14", **how: Any) -> Variant:
    return Variant("arc", backend, {"ratio": ratio, "error_feedback": feedback, **how})


def rank_of_powersgd(rank: int, backend: str, reliable: bool = False) -> Variant:
    return Variant("powersgd", backend, {"matrix_approximation_rank": rank}, reliable)


VARIANTS: Mapping[str, Variant] = {
    "dense, gloo": Variant("", "gloo"),
    "PowerSGD 1, gloo": rank_of_powersgd(1, "gloo"),
    "PowerSGD 4, gloo": rank_of_powersgd(4, "gloo"),
    "Top-K 0.05, gloo": arc(0.05, "gloo", method="topk"),
    "ARC 0.2, gloo": arc(0.2, "gloo"),
    "ARC 0.05, gloo": arc(0.05, "gloo"),
    "dense, lossy": Variant("", "lossy"),
    "ARC 0.2, lossy": arc(0.2, "lossy"),
    "ARC 0.1, lossy": arc(0.1, "lossy"),
    "ARC 0.05, lossy": arc(0.05, "lossy"),
    "PowerSGD 4, lossy": rank_of_powersgd(4, "lossy", reliable=True),
    "Top-K 0.05, lossy": arc(0.05, "lossy", method="topk"),
    "ARC 0.1, lossy, EF21": arc(0.1, "lossy", "ef21"),
    "ARC 0.1, lossy, EF21M 0.1": arc(0.1, "lossy", "ef21m", momentum=0.1),
    "ARC 0.1, lossy, EF21M 0.3": arc(0.1, "lossy", "ef21m", momentum=0.3),
    "ARC 0.1, lossy, EF21M 0.6": arc(0.1, "lossy", "ef21m", momentum=0.6),
    "ARC 0.1, lossy, none": arc(0.1, "lossy", "none"),
    "ARC 0.2, lossy, none": arc(0.2, "lossy", "none"),
    "ARC 0.05, lossy, none": arc(0.05, "lossy", "none"),
}
STEP_VARIANTS = (
    *("dense, gloo", "PowerSGD 1, gloo", "PowerSGD 4, gloo", "Top-K 0.05, gloo"),
    *("ARC 0.2, gloo", "ARC 0.05, gloo", "dense, lossy", "ARC 0.2, lossy", "ARC 0.05, lossy"),
)
TRAIN_VARIANTS = (
    *("dense, gloo", "dense, lossy", "PowerSGD 4, lossy", "Top-K 0.05, lossy"),
    *("ARC 0.2, lossy", "ARC 0.1, lossy", "ARC 0.05, lossy"),
)
NONE_VARIANTS = ("ARC 0.2, lossy, none", "ARC 0.05, lossy, none")
"""Without error feedback."""
RULES = ("EF21", "EF21M 0.1", "EF21M 0.3", "EF21M 0.6", "none")
RULE_VARIANTS = tuple(f"ARC 0.1, lossy, {rule}" for rule in RULES)


@dataclass(frozen=True)
class Groups:
    """Of all ranks; the default group, None, is lossy."""

    gloo: dist.ProcessGroup
    reliable: dist.ProcessGroup

    @classmethod
    def made(cls) -> Groups:
        options = lossycoll.Options(delivery="reliable")
        return cls(
            dist.new_group(backend="gloo"), dist.new_group(backend="lossy", pg_options=options)
        )

    def of(self, variant: Variant) -> dist.ProcessGroup | None:
        if variant.backend == "gloo":
            return self.gloo
        return self.reliable if variant.reliable else None


def replica(
    variant: Variant, model: nn.Module, group: dist.ProcessGroup | None, start: int
) -> DistributedDataParallel:
    """``group``: that of the variant. ``start``: steps before which all is sent whole."""
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=ONE_BUCKET_MIB)
    if variant.hook == "arc":
        state = lossycoll.ARCTopKState(group, start_iter=start, **variant.how)
        ddp.register_comm_hook(state, lossycoll.arc_topk_hook)
    elif variant.hook == "powersgd":
        memory = powersgd.PowerSGDState(
            group, start_powerSGD_iter=max(2, start), orthogonalization_epsilon=1e-8, **variant.how
        )
        hook: Callable[..., Any] = powersgd.powerSGD_hook
        ddp.register_comm_hook(memory, hook)
    return ddp

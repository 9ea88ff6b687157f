"""The parameter groups of the model, as the user gave them, beside those of this rank's fragments.

Torch's Optimizer checks and keeps them: leaf tensors, each in one group, names for all or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class ModelGroups(Optimizer):
    """``param_groups``: the model's parameters, and the options as they were written.

    It takes no steps.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @contextlib.contextmanager
    def adding(
        self, param_group: dict[str, Any], frozen: Collection[Parameter]
    ) -> Iterator[tuple[dict[str, Any], set[Parameter]]]:
        """Adds a group; if the block raises, the groups are what they were before.

        Those of ``frozen`` that require gradients now leave the groups that they are in. Yields the
        new group, and the parameters that were frozen.
        """
        added = dict(param_group)
        members = added["params"]
        added["params"] = [members] if isinstance(members, Tensor) else list(members)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in added["params"]]
        thawed = {tensor for tensor in tensors if tensor in frozen and tensor.requires_grad}
        before = [list(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p not in thawed]
        try:
            self.add_param_group(added)
            yield added, thawed
        except BaseException:
            for group, parameters in zip(self.param_groups, before, strict=False):
                group["params"] = parameters
            del self.param_groups[len(before) :]
            raise

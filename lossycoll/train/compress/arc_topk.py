"""ARC-Top-K with its memory, for hooks, optimizers and whoever has gradients."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.train.common.consistency import Meant, as_lines, check_same
from lossycoll.train.common.layout import is_dense

from ...errors import CheckpointError, OptionError, TrainingError, UnsupportedError
from .error_memory import NAMES, Memory
from .rows import Form, entries, natural, pays
from .settings import DENSE_BELOW, Settings
from .step import Item, Reduction, Traffic, reduce_whole
from .transport import Transport

Dense = Callable[[str, Tensor], bool] | Collection[str]
VERSION: Final = 1


class ARCTopKState:
    """Compresses gradients by ARC-Top-K (Chen, Ma, Li, He, Dong, Yuan, arXiv 2510.26709,
    algorithm 1), and remembers what wasn't sent. For :func:`arc_topk_hook`::

        state = lossycoll.ARCTopKState(ratio=0.2, start_iter=1000)
        ddp.register_comm_hook(state, lossycoll.arc_topk_hook)

    A gradient of two or more dimensions is a matrix of m rows (its first dimension) and n columns.
    All ranks sum a sketch of it, m r numbers, choose the K = ceil(ratio m) rows whose sketches are
    largest, the same ones everywhere, and average these alone, K n numbers. Gradients of fewer
    dimensions, below ``dense_below`` elements, or for which m r + K n is no less than m n, are sent
    whole, together with the rows. docs/arc_topk.md has the method, its rules under loss, and what
    it costs and saves.

    ``process_group``: the ranks, of any backend (None: the default group). Over "lossy" the sketch
    is reliable, so that all ranks choose the same rows, and rows may be lost on their way to the
    rank that adds them up. What is lost stays in the error memory of the rank that sent it (with
    ``error_feedback="none"`` the mean is over what arrived). Means come back reliably: replicas are
    equal, bit for bit. In a block of ``lossycoll.reliable()`` nothing is lost.

    ``ratio``: of the rows, above 0, up to 1. With 1 nothing is compressed. ``sketch_dim``: r.

    ``start_iter``: steps before which all is sent whole.

    ``error_feedback``: "none", "ef14", "ef21" or "ef21m" (:mod:`.feedback`), which need 0, 1, 2 and
    3 more tensors as large as each matrix (:meth:`memory_bytes`). ``momentum``: eta of "ef21m", the
    weight of the new gradient in the running average that is sent: above 0, up to 1, which is
    "ef21". What is sent whole isn't averaged over steps.

    ``method``: "arc"; or, for comparison, "randk", rows drawn at random, and "topk", each rank's
    own largest entries, which travel with their indices through an all-gather.

    ``sketch_dtype``: of the sketch on its way (None: the gradient's, at least float32). Memories
    are at least float32; rows travel in the gradient's type, and what rounding takes is remembered.

    ``dense``: what is sent whole besides: names, or a function of (name, gradient). Names need
    ``named_parameters`` (``model.named_parameters()``), which also puts names into errors and
    checkpoints. Without it parameters are known by the order in which the hook first meets them,
    the same in every run of a model if the hook is registered before the first step.

    ``on_nonfinite``: what becomes of a matrix that holds NaN or infinity on any rank. "pass": NaN
    on all ranks, for a GradScaler or whoever looks; no memory changes. "raise": NonFiniteError.

    ``seed``: of directions of sketches and random rows. torch's global generators aren't touched.

    All ranks must have equal arguments, and make steps alike; the first step compares them.
    Raises OptionError for bad arguments. The hook raises UnsupportedError for sparse gradients,
    TrainingError for a parameter that has changed its shape, MismatchError where ranks differ.

    Pickles as PowerSGDState does, without the group; see also :meth:`state_dict`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        ratio: float = 0.2,
        sketch_dim: int = 4,
        start_iter: int = 1000,
        error_feedback: str = "ef21m",
        momentum: float = 0.9,
        *,
        method: str = "arc",
        sketch_dtype: torch.dtype | None = None,
        dense: Dense = (),
        dense_below: int = DENSE_BELOW,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        on_nonfinite: str = "pass",
        seed: int = 0,
    ) -> None:
        self.settings = Settings(
            ratio=ratio,
            sketch_dim=sketch_dim,
            start_iter=start_iter,
            error_feedback=error_feedback,
            momentum=momentum,
            method=method,
            sketch_dtype=sketch_dtype,
            dense_below=dense_below,
            on_nonfinite=on_nonfinite,
            seed=seed,
        )
        self.process_group = process_group
        self.iter = 0
        """Steps so far."""
        self._dense = dense if callable(dense) else frozenset(dense)
        self._memories: dict[str, Memory] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._owed: dict[str, Tensor] = {}
        self._traffic = Traffic()
        self._live()
        if named_parameters is not None:
            self.name(named_parameters)
        elif not callable(dense) and dense:
            raise OptionError(
                f"dense has names ({', '.join(sorted(dense)[:3])}), wanted named_parameters="
                f"model.named_parameters() beside them, or a function"
            )

    def _live(self) -> None:
        """What doesn't outlive the process."""
        self._keys: dict[Tensor, str] = {}
        self._named = False
        self._transport: Transport | None = None
        self._worker: ThreadPoolExecutor | None = None

    def name(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Tells the parameters' names, also after unpickling. Before the first step.

        Raises OptionError if ``dense`` names none of them.
        """
        pairs = list(named_parameters)
        self._keys = {parameter: name for name, parameter in pairs}
        self._named = True
        if not callable(self._dense):
            unknown = self._dense - {name for name, _ in pairs}
            if unknown:
                raise OptionError(
                    f"dense names {', '.join(sorted(unknown)[:3])}, wanted names of parameters, as "
                    f"{', '.join(name for name, _ in pairs[:3])}"
                )

    # ---- a step ----

    def mean_(self, gradients: Sequence[Tensor], keys: Sequence[str] | None = None) -> None:
        """Replaces ``gradients``, strided floats in one order on all ranks, by what is to be used
        of all ranks' together: one step. ``keys`` tell them from one step to the next (None: their
        places in the sequence). All ranks must call this.
        """
        keys = [str(i) for i in range(len(gradients))] if keys is None else keys
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, gradient in enumerate(gradients):
            groups.setdefault((gradient.dtype, gradient.device), []).append(i)
        for places in groups.values():
            self.reduce([keys[i] for i in places], [gradients[i] for i in places])
        self.iter += 1

    def reduce(
        self, keys: Sequence[str], gradients: Sequence[Tensor], flat: Tensor | None = None
    ) -> None:
        """A part of a step: gradients of one type and device, in place. The caller counts steps.

        ``flat``: what they are all views of, where there is such a vector.
        """
        transport = self._ready(gradients[0].device)
        for key, gradient in zip(keys, gradients, strict=True):
            self._check(key, gradient)
        if self.iter < self.settings.start_iter:
            if flat is None:
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                reduce_whole(flat, transport, self._traffic)
                sizes = [gradient.numel() for gradient in gradients]
                with torch.no_grad():
                    for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
                        gradient.copy_(mean.view(gradient.shape))
            else:
                reduce_whole(flat, transport, self._traffic)
            return
        items = [self._item(*pair) for pair in zip(keys, gradients, strict=True)]
        Reduction(items, self.settings, transport, self._owed, self._traffic, self.iter).run()

    def _ready(self, device: torch.device) -> Transport:
        """The group; compares the ranks' arguments at the first step."""
        if self._transport is None:
            transport = Transport(self.process_group)
            mine = {**asdict(self.settings), "iter": self.iter, "memories": self._remembered()}
            check_same(
                [Meant(transport.group, as_lines(mine), device)],
                "ARCTopKState is made differently",
                "make them alike on all ranks",
            )
            self._transport = transport
        return self._transport

    def _remembered(self) -> list[tuple[str, tuple[int, ...]]]:
        begun = {key for key, memory in self._memories.items() if memory.tensors}
        return [(key, shape) for key, shape in sorted(self._shapes.items()) if key in begun]

    def _check(self, key: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            kind = gradient.dtype if gradient.layout is torch.strided else gradient.layout
            raise UnsupportedError(
                f"the gradient of {self._say(key)} is {kind}, wanted a dense one of floats; make "
                f"an embedding with sparse=False"
            )
        shape = tuple(gradient.shape)
        if not is_dense(shape, gradient.stride()):
            raise UnsupportedError(
                f"the gradient of {self._say(key)} is of shape {shape} and stride "
                f"{gradient.stride()}, which leaves gaps; give a .contiguous() one"
            )
        if self._shapes.setdefault(key, shape) != shape:
            raise TrainingError(
                f"the gradient of {self._say(key)} is of shape {shape}, and was {self._shapes[key]}"
                f" before; make a new ARCTopKState for a changed model, or call reset()"
            )

    def _say(self, key: str) -> str:
        return repr(key) if self._named else f"parameter {key}"

    def _item(self, key: str, gradient: Tensor) -> Item:
        form = self.form(key, gradient)
        memory = None
        if form is not None:
            memory = self._memories.get(key)
            if memory is None:
                memory = Memory(self.settings.error_feedback, self.settings.momentum)
                self._memories[key] = memory
        return Item(key, self._say(key), gradient, form, memory)

    def form(self, key: str, gradient: Tensor) -> Form | None:
        """As what matrix a gradient is compressed; None if it is sent whole."""
        own = self.settings.method == "topk"
        if gradient.dim() < 2 or gradient.numel() < max(1, self.settings.dense_below):
            return None
        if self._dense(key, gradient) if callable(self._dense) else key in self._dense:
            return None
        form = (entries if own else natural)(tuple(gradient.shape))
        dim = self.settings.sketch_dim if self.settings.method == "arc" else 0
        return form if pays(form, self.settings.ratio, dim) else None

    # ---- for a hook ----

    def keys(self, parameters: Iterable[Tensor]) -> list[str]:
        """Of parameters: their names, or numbers in the order in which they are met."""
        out = []
        for parameter in parameters:
            if parameter not in self._keys:
                if self._named:
                    raise TrainingError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient but isn't "
                        f"one of named_parameters; give those of the model that DDP wraps"
                    )
                self._keys[parameter] = str(len(self._keys))
            out.append(self._keys[parameter])
        return out

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Runs ``work`` in this state's thread, after what was started before, with the options of
        the block of code that the caller is in. One thread, so that all ranks issue the same
        collectives in the same order, whatever their backward passes do meanwhile."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "lossycoll-arc-topk")
        return self._worker.submit(contextvars.copy_context().run, work)

    # ---- figures ----

    def traffic(self) -> Mapping[str, int]:
        """What this rank has handed to collectives so far: numbers sent ``whole``, in ``sketch``,
        ``rows``, ``indices`` and ``flags`` (of NaN); ``lost`` of them; and the ``bytes`` of all."""
        return asdict(self._traffic)

    def memory_bytes(self) -> int:
        """Bytes of this rank's memory of errors."""
        held = [t for memory in self._memories.values() for t in memory.tensors.values()]
        return sum(t.numel() * t.element_size() for t in (*held, *self._owed.values()))

    # ---- checkpoints ----

    def reset(self) -> None:
        """Forgets all errors, on all ranks alike; ``iter`` stays."""
        self._memories, self._shapes, self._owed, self._transport = {}, {}, {}, None

    def state_dict(self) -> dict[str, Any]:
        """This rank's own: every rank saves its own, and loads it at the same number of ranks."""
        return {
            "version": VERSION,
            "iter": self.iter,
            "world": dist.get_world_size(self.process_group) if dist.is_initialized() else None,
            "error_feedback": self.settings.error_feedback,
            "method": self.settings.method,
            "memories": {
                key: {name: tensor.clone() for name, tensor in memory.tensors.items()}
                for key, memory in self._memories.items()
            },
            "shapes": dict(self._shapes),
            "owed": {key: tensor.clone() for key, tensor in self._owed.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned at this rank.

        Raises CheckpointError for another rule, method or number of ranks; then nothing changes.
        """
        mine = {
            "version": VERSION,
            "error_feedback": self.settings.error_feedback,
            "method": self.settings.method,
        }
        if dist.is_initialized() and state_dict.get("world") is not None:
            mine["world"] = dist.get_world_size(self.process_group)
        for name, value in mine.items():
            if name not in state_dict or state_dict[name] != value:
                raise CheckpointError(
                    f"the state's {name} is {state_dict.get(name)!r}, wanted {value!r}: errors are "
                    f"one rank's, by one rule; leave the state out to begin without errors"
                )
        memories = {}
        for key, tensors in state_dict["memories"].items():
            if tensors and set(tensors) != set(NAMES[self.settings.error_feedback]):
                raise CheckpointError(
                    f"the state of {key!r} has {', '.join(tensors)}, wanted "
                    f"{', '.join(NAMES[self.settings.error_feedback])}"
                )
            memory = Memory(self.settings.error_feedback, self.settings.momentum)
            memory.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            memories[key] = memory
        self._memories, self._shapes = memories, dict(state_dict["shapes"])
        self._owed = {key: tensor.clone() for key, tensor in state_dict["owed"].items()}
        self.iter = int(state_dict["iter"])
        self._transport = None

    def __getstate__(self) -> dict[str, Any]:
        live = {"process_group", "_keys", "_named", "_transport", "_worker"}
        return {name: value for name, value in self.__dict__.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None
        self._live()

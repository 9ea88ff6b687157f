"""ARC-Top-K with its memory, for hooks, optimizers and whoever has gradients."""

from __future__ import annotations

import contextlib
import contextvars
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import (
    CheckpointError,
    NonFiniteError,
    OptionError,
    TrainingError,
    UnsupportedError,
)
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.common.consistency import Agreement, as_lines, check_same
from lossycoll.train.common.delivery import Wire
from lossycoll.train.common.layout import is_dense

from .error_memory import RULES, ErrorMemory, memory_of
from .selection import MatrixShape, pays
from .step import (
    DENSE_BELOW,
    ARCTopKSettings,
    BucketGradient,
    BucketStep,
    TrafficCounts,
    mean_whole,
)

Dense = Callable[[str, Tensor], bool] | Collection[str]
VERSION: Final = 1


class ARCTopKState:
    """Compressor of gradients by ARC-Top-K, with a memory of values that were not delivered.

    Pass it to :func:`~lossycoll.arc_topk_hook` or ``ShardedOptimizer(compression=...)``, or call
    :meth:`mean_` with gradients of your own. Construct it on all ranks with the same arguments; the
    first step compares them.

    A gradient of two or more dimensions is a matrix of m rows (its first dimension) and n columns.
    All ranks sum a sketch of it (m r numbers). By the sketch they choose the same K = ceil(ratio m)
    rows, and average these (K n numbers). A gradient of fewer dimensions, below ``dense_below``
    elements, or with m r + K n >= m n is sent whole. Over "lossy" rows may be lost, but replicas
    stay equal, bit for bit: lost rows stay in the sender's error memory (docs/arc_topk.md).
    Source: Chen, Ma, Li, He, Dong, Yuan, arXiv 2510.26709, algorithm 1.

    Args:
        process_group: The ranks, of any backend; None is the default group.
        ratio: Share of the rows that is sent, above 0, up to 1.
        sketch_dim: r, the number of elements in a row's sketch.
        start_iter: Number of initial steps in which everything is sent whole.
        error_feedback: Error feedback rule: "none", "ef14", "ef21" or "ef21m". They remember 0, 1,
            2 or 3 tensors as large as each matrix.
        momentum: eta of "ef21m", the weight of the new gradient in the average that is sent.
        method: "arc"; to compare with it, "randk" (random rows) or "topk" (each rank's own largest
            elements).
        sketch_dtype: Type of the sketch in packets; None: the gradient's, at least float32.
        dense: Other gradients that are sent whole: names, or a function of (name, gradient).
        dense_below: Number of elements below which a gradient is sent whole.
        named_parameters: ``model.named_parameters()``, for ``dense``, errors and checkpoints.
        on_nonfinite: If a matrix holds NaN or infinity on any rank, "pass" makes it NaN on all, and
            "raise" raises NonFiniteError. Neither changes the memory of that matrix, and "raise"
            none of a whole :meth:`mean_`, or of a hook's bucket.
        seed: Seed of sketches and random rows. torch's generators are not used.
        wire: Encoding, between hosts, of float32 rows and of gradients sent whole, as the option:
            "int8" for contributions and means, "int4/int8" for each of them. Rounding error is
            remembered like loss. None: contributions use the group's encoding, means none.

    Raises:
        OptionError: An argument has a value it cannot have.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        ratio: float = 0.2,
        sketch_dim: int = 4,
        start_iter: int = 1000,
        error_feedback: str = "ef14",
        momentum: float = 0.9,
        *,
        method: str = "arc",
        sketch_dtype: torch.dtype | None = None,
        dense: Dense = (),
        dense_below: int = DENSE_BELOW,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        on_nonfinite: str = "pass",
        seed: int = 0,
        wire: str | None = None,
    ) -> None:
        self.settings: ARCTopKSettings = ARCTopKSettings(
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
            wire=wire,
        )
        self.process_group = process_group
        self.iter: int = 0
        """Steps so far."""
        self._dense = dense if callable(dense) else frozenset(dense)
        self._memory = self._empty_memory()
        self._held_at: int | None = None  # the step that can be undone; None: no step shall be
        self._counts = TrafficCounts()
        self._init_process_state()
        if named_parameters is not None:
            self.name(named_parameters)
        elif not callable(dense) and dense:
            raise OptionError(
                f"dense has names ({', '.join(sorted(dense)[:3])}), wanted named_parameters="
                f"model.named_parameters() beside them, or a function"
            )

    def _init_process_state(self) -> None:
        self._keys: dict[Tensor, str] = {}
        """Names of parameters; while none are set, numbers in the order in which they are met: the
        same in every run of a model, if all are met in the first step."""
        self._named = False
        self._collectives: Collectives | None = None
        """Once the ranks' arguments have been compared."""
        self._worker: ThreadPoolExecutor | None = None

    def _empty_memory(self) -> defaultdict[str, ErrorMemory]:
        """The memories of this rank's gradients, by key."""
        settings = self.settings
        return defaultdict(partial(memory_of, settings.error_feedback, settings.momentum))

    def name(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Set the parameters' names. Call it before the first step, also after unpickling.

        Args:
            named_parameters: ``model.named_parameters()``.

        Raises:
            OptionError: ``dense`` has a name that no parameter has.
        """
        pairs = list(named_parameters)
        self._keys, self._named = {parameter: name for name, parameter in pairs}, True
        if not callable(self._dense):
            unknown = self._dense - {name for name, _ in pairs}
            if unknown:
                raise OptionError(
                    f"dense names {', '.join(sorted(unknown)[:3])}, wanted names of parameters, as "
                    f"{', '.join(name for name, _ in pairs[:3])}"
                )

    # ---- a step ----

    def mean_(self, gradients: Sequence[Tensor], keys: Sequence[str] | None = None) -> None:
        """Take one step: replace ``gradients`` by the compressed mean over all ranks.

        All ranks must call this.

        Args:
            gradients: Dense floating-point tensors without gaps, in the same order on all ranks.
            keys: Names that identify the gradients from step to step; None: their positions.

        Raises:
            UnsupportedError: A gradient is sparse, not floating-point, or has gaps.
            TrainingError: A gradient has changed its shape.
            NonFiniteError: A matrix holds NaN or infinity, and ``on_nonfinite`` is "raise"; on all
                ranks.
            MismatchError: The ranks' arguments, steps or memories differ.
            PeerLostError: A rank was lost, and its memory with it.
        """
        keys = [str(i) for i in range(len(gradients))] if keys is None else keys
        # Rows are stretches of memory, and other ranks may have another order of it.
        worked = []
        for gradient in gradients:
            dense = gradient.layout is torch.strided and is_dense(gradient)  # others are refused
            worked.append(gradient.contiguous() if dense else gradient)
        buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, gradient in enumerate(worked):
            buckets.setdefault((gradient.dtype, gradient.device), []).append(i)
        with self._undoing(keys, hold=False):
            for places in buckets.values():
                self._reduce([keys[i] for i in places], [worked[i] for i in places])
        with torch.no_grad():
            for gradient, mean in zip(gradients, worked, strict=True):
                if mean is not gradient:
                    gradient.copy_(mean)
        self.iter += 1

    def reduce(
        self,
        keys: Sequence[str],
        gradients: Sequence[Tensor],
        flat: Tensor | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Average gradients of one type and device in place: a part of a step, for hooks.

        The caller counts steps in :attr:`iter`. Errors are those of :meth:`mean_`.

        Args:
            keys: The gradients' names, from :meth:`keys`.
            gradients: This rank's gradients, which become the means.
            flat: Vector of which all gradients are views, if there is one.
            hold: Whether :meth:`discard` can undo it, as after :meth:`hold`.
        """
        with self._undoing(keys, hold=hold):
            self._reduce(keys, gradients, flat)

    @contextlib.contextmanager
    def _undoing(self, keys: Sequence[str], *, hold: bool) -> Iterator[None]:
        """A scope whose changes of the memory are undone by NonFiniteError, or with ``hold`` later
        on by :meth:`discard`."""
        hold = hold or self._held_at is not None
        if not hold and self.settings.on_nonfinite != "raise":
            yield
            return
        if self._held_at not in (None, self.iter):
            self.commit()  # of the step before, also where it had other keys
            self._held_at = self.iter
        for key in keys:
            self._memory[key].hold()
        try:
            yield
        except NonFiniteError:
            self.discard(keys)
            raise
        if not hold:
            self.commit(keys)

    def _reduce(
        self, keys: Sequence[str], gradients: Sequence[Tensor], flat: Tensor | None = None
    ) -> None:
        collectives = self._checked_collectives(gradients[0].device)
        pairs = list(zip(keys, gradients, strict=True))
        for key, gradient in pairs:
            self._check(key, gradient)
        if self.iter < self.settings.start_iter:
            joined = torch.cat([each.reshape(-1) for each in gradients]) if flat is None else flat
            mean_whole(joined, collectives, self._counts)
            if flat is None:
                means = torch.split(joined, [gradient.numel() for gradient in gradients])
                for gradient, mean in zip(gradients, means, strict=True):
                    gradient.detach().copy_(mean.view(gradient.shape))
            return
        found = []
        for key, gradient in pairs:
            memory, shape = self._memory[key], self.matrix_shape(key, gradient)
            memory.move(gradient.device)
            found.append(BucketGradient(key, self._say(key), gradient, shape, memory))
        settings = self.settings
        keeps_mean = RULES[settings.error_feedback].keeps_mean
        if keeps_mean and gradients[0].element_size() < 4 and settings.wire is None:
            # Means are formed in float32 (_like_sent), which so travels in as few bytes. What
            # rounding takes counts as not delivered.
            collectives = Collectives(self.process_group, wire=Wire.of("bf16"))
        BucketStep(found, settings, collectives, self._counts, self.iter).run()

    def _checked_collectives(self, device: torch.device) -> Collectives:
        """The group; compares the ranks' arguments at the first step."""
        if self._collectives is None:
            collectives = Collectives(self.process_group, wire=Wire.of(self.settings.wire))
            known = [(key, one.shape) for key, one in sorted(self._memory.items()) if one.tensors]
            mine = {**asdict(self.settings), "iter": self.iter, "memories": known}
            check_same(
                [Agreement(collectives, as_lines(mine), device)],
                "ARCTopKState is made differently",
                "make them alike on all ranks",
            )
            self._collectives = collectives
        return self._collectives

    def _check(self, key: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            kind = gradient.dtype if gradient.layout is torch.strided else gradient.layout
            raise UnsupportedError(
                f"the gradient of {self._say(key)} is {kind}, wanted a dense one of floats; "
                f"make an embedding with sparse=False"
            )
        shape = tuple(gradient.shape)
        if not is_dense(gradient):
            raise UnsupportedError(
                f"the gradient of {self._say(key)} is of shape {shape} and stride "
                f"{gradient.stride()}, which leaves gaps; give a .contiguous() one"
            )
        memory = self._memory[key]
        if memory.shape not in (None, shape):
            raise TrainingError(
                f"the gradient of {self._say(key)} is of shape {shape}, and was {memory.shape} "
                f"before; make a new ARCTopKState for a changed model, or call reset()"
            )
        memory.shape = shape

    def matrix_shape(self, key: str, gradient: Tensor) -> MatrixShape | None:
        """Return the shape of the matrix as which a gradient is compressed.

        Args:
            key: The gradient's name.
            gradient: The gradient; only its shape is used.

        Returns:
            Rows and columns; None if the gradient is sent whole.
        """
        settings = self.settings
        if gradient.dim() < 2 or gradient.numel() < max(1, settings.dense_below):
            return None
        if self._dense(key, gradient) if callable(self._dense) else key in self._dense:
            return None
        rows = gradient.numel() if settings.own_rows else len(gradient)
        shape = MatrixShape(rows, gradient.numel() // rows)
        return shape if pays(shape, settings.ratio, settings.sketch_size) else None

    # ---- steps whose gradients aren't used ----

    def hold(self) -> None:
        """Let :meth:`discard` undo the last step, from the next step on.

        The memory then takes up to twice its size. ShardedOptimizer does this by itself.
        """
        if self._held_at is None:
            self._held_at = -1

    def discard(self, keys: Iterable[str] | None = None) -> None:
        """Make the memory what it was before the last step, whose gradients were not used.

        Without :meth:`hold`, and after :meth:`commit`, it does nothing. All ranks must call this
        alike. The step still counts in :attr:`iter`.

        Args:
            keys: Names of gradients, from :meth:`keys`; None: all.
        """
        for key in list(self._memory) if keys is None else keys:
            self._memory[key].revert()

    def commit(self, keys: Iterable[str] | None = None) -> None:
        """Free what :meth:`discard` would need to undo the last step.

        Args:
            keys: Names of gradients, from :meth:`keys`; None: all.
        """
        for key in list(self._memory) if keys is None else keys:
            self._memory[key].commit()

    # ---- for a hook ----

    def keys(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the names of parameters.

        Args:
            parameters: Parameters of the model.

        Returns:
            Their names; without names, numbers in the order of first use.

        Raises:
            TrainingError: A parameter isn't one of the ``named_parameters``.
        """
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

    def _say(self, key: str) -> str:
        return repr(key) if self._named else f"parameter {key}"

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in this state's thread, after earlier work, with the caller's options.

        With one thread, all ranks submit the same collectives in the same order, independently of
        their backward passes.

        Args:
            work: The function to run.

        Returns:
            A future that is done when the work is.
        """
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "lossycoll-arc-topk")
        return self._worker.submit(contextvars.copy_context().run, work)

    def _run(self, work: Callable[[], None], *, on_host: bool) -> Future[None]:
        """Runs ``work`` in this state's thread, or here, where kernels are only queued. Either way
        an error comes from the future: so all buckets have been started when it is raised."""
        if on_host:
            return self.start(work)
        done: Future[None] = Future()
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    # ---- figures ----

    def traffic(self) -> Mapping[str, int]:
        """Return counts of the numbers that this rank has passed to collectives.

        Returns:
            Counts of numbers sent ``whole``, in a ``sketch``, in ``rows``, as ``indices`` and as
            ``flags`` (of NaN). Of ``whole`` and ``rows``, ``lost`` counts the numbers that were
            lost or rounded. ``bytes`` is the size of all.
        """
        return asdict(self._counts)

    def memory_bytes(self) -> int:
        """Bytes of this rank's memory."""
        kept = [t for one in self._memory.values() for t in (*one.tensors.values(), one.residual)]
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    # ---- checkpoints ----

    def reset(self) -> None:
        """Clear the memory, but not :attr:`iter`. All ranks must call this."""
        self._memory, self._collectives = self._empty_memory(), None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, which it loads again at the same number of ranks."""
        memory = self._memory.items()
        return {
            **self._identity(),
            "iter": self.iter,
            "memories": {key: deepcopy(one.tensors) for key, one in memory if one.tensors},
            "shapes": {key: one.shape for key, one in memory if one.shape is not None},
            "owed": {key: one.residual.clone() for key, one in memory if one.residual is not None},
        }

    def _identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        return {
            "version": VERSION,
            "world": dist.get_world_size(self.process_group) if dist.is_initialized() else None,
            "error_feedback": self.settings.error_feedback,
            "method": self.settings.method,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on this rank.

        Args:
            state_dict: The state that was returned.

        Raises:
            CheckpointError: The state is of another rule, method or number of ranks. Nothing has
                changed.
        """
        for name, value in self._identity().items():
            if name == "world" and None in (value, state_dict.get(name)):
                continue  # one of them has been without ranks
            if name not in state_dict or state_dict[name] != value:
                raise CheckpointError(
                    f"the state's {name} is {state_dict.get(name)!r}, wanted {value!r}: errors are "
                    f"one rank's, by one rule; leave the state out to begin without errors"
                )
        memory, names = self._empty_memory(), RULES[self.settings.error_feedback].names
        for key, tensors in state_dict["memories"].items():
            if tensors and set(tensors) != set(names):
                raise CheckpointError(
                    f"the state of {key!r} has {', '.join(tensors)}, wanted {', '.join(names)}"
                )
            memory[key].tensors = deepcopy(tensors)
        for key, shape in state_dict["shapes"].items():
            memory[key].shape = shape
        for key, residual in state_dict["owed"].items():
            memory[key].residual = residual.clone()
        self._memory = memory
        self.iter = int(state_dict["iter"])
        self._collectives = None

    def __getstate__(self) -> dict[str, Any]:
        live = {"process_group", "_keys", "_named", "_collectives", "_worker"}
        return {name: value for name, value in self.__dict__.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None
        self._init_process_state()

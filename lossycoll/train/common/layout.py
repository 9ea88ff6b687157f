"""Layout of parameters in buckets, as data.

A bucket is a flat stretch of elements that one collective carries: whole parameters one after
another, in the order in which the backward pass is expected to finish them, then padding up to a
size that splits into equal chunks, one for each owner: all ranks, or some. What a rank's chunk has
of one parameter is a fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

ALIGNMENT: Final = 64
"""Bytes: where each parameter and each chunk begins. A cache line, a vector of AVX-512, and what
torch aligns its own tensors to, so kernels compiled for those take the views as they are."""
BUCKET_BYTES: Final = 25 << 20
"""DDP's size: large enough to make the fixed cost of a collective small, and small enough that
several are under way while the backward pass still computes."""
FIRST_BUCKET_BYTES: Final = 1 << 20
"""DDP's size: the sooner the first bucket is full, the sooner anything travels."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, in a bucket
    itemsize: int  # bytes of an element
    key: Hashable = None  # only parameters of equal keys share a bucket

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketMember:
    index: int  # the parameter's, in order of registration
    begin: int  # the bucket's element at which it begins
    end: int  # after its last one
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # its strides in the bucket, in elements

    def view(self, flat: Tensor) -> Tensor:
        """Its part of a bucket's elements (size,), in its shape."""
        return flat.as_strided(self.shape, self.stride, self.begin)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of elements of a bucket that is one rank's, and one parameter's."""

    member: BucketMember  # the parameter
    begin: int  # the bucket's element at which it begins
    end: int  # after its last one
    whole: bool = False  # stepped as the parameter that it is, in its shape

    @property
    def offset(self) -> int:
        """Offset of its first element within its parameter, in the order of memory."""
        return self.begin - self.member.begin


@dataclass(frozen=True, slots=True)
class Bucket:
    key: Hashable  # of all its parameters
    members: tuple[BucketMember, ...]  # its parameters, in order
    counts: tuple[int, ...]  # elements of each rank's chunk, with padding: 0, or the same
    whole: bool = False  # no parameter is cut: each is in one rank's chunk

    @property
    def size(self) -> int:
        """Elements, with padding."""
        return sum(self.counts)

    def chunk(self, rank: int) -> slice:
        """The elements that a rank owns."""
        first = sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])

    def fragments(self, rank: int) -> list[Fragment]:
        own = self.chunk(rank)
        return [
            Fragment(member, max(member.begin, own.start), min(member.end, own.stop), self.whole)
            for member in self.members
            if max(member.begin, own.start) < min(member.end, own.stop)
        ]


def lay_out(
    specs: Sequence[ParameterSpec],
    world: int,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
    start: int = 0,
    whole: bool = False,
    owners: Callable[[int], int] | None = None,
) -> list[Bucket]:
    """The buckets of parameters, in the order in which they are expected to become full.

    Parameters are taken last first, since the backward pass ends with the first. Those of one key
    fill one bucket after another; a parameter that is larger than a bucket has one of its own.
    With ``whole`` no parameter is cut: a bucket has room for as many of the largest one as there
    are ranks, and what a rank has less of is padding that travels.

    ``owners``: how many ranks own a bucket of so many bytes; None: all. Where these are fewer, the
    next bucket has the next ones.
    """
    if whole:
        bucket_bytes = max(bucket_bytes, world * max(map(_padded, specs), default=0))
        first_bytes = bucket_bytes
    limit = min(first_bytes, bucket_bytes)
    filling: dict[Hashable, list[int]] = {}
    done: list[list[int]] = []
    for index in reversed(range(len(specs))):
        spec = specs[index]
        indices = filling.setdefault(spec.key, [])
        if indices and _bytes(specs, indices) + _padded(spec) > limit:
            done.append(filling.pop(spec.key))
            indices, limit = filling.setdefault(spec.key, []), bucket_bytes
        indices.append(index)
        if _bytes(specs, indices) >= limit:
            done.append(filling.pop(spec.key))
            limit = bucket_bytes
    done += filling.values()
    # A bucket is full when its last member is, so that is what puts them in order.
    done.sort(key=lambda indices: -indices[-1])
    buckets, first = [], 0
    for indices in done:
        count = world if owners is None else owners(_bytes(specs, indices))
        ranks = frozenset((first + i) % world for i in range(count))
        first = (first + count) % world
        buckets.append(_bucket(specs, indices, world, ranks, start, whole=whole))
    return buckets


def _bucket(
    specs: Sequence[ParameterSpec],
    indices: Sequence[int],
    world: int,
    owners: Collection[int],
    start: int,
    *,
    whole: bool,
) -> Bucket:
    members = []
    place = _dealt if whole else _in_a_row
    begins, chunk = place([specs[index] for index in indices], len(owners))
    for index, begin in zip(indices, begins, strict=True):
        shape, stride, end = specs[index].shape, specs[index].stride, begin + specs[index].numel
        members.append(BucketMember(start + index, begin, end, shape, stride))
    counts = tuple([chunk if rank in owners else 0 for rank in range(world)])
    return Bucket(specs[indices[0]].key, tuple(members), counts, whole)


def _in_a_row(specs: Sequence[ParameterSpec], parts: int) -> tuple[list[int], int]:
    """Where each parameter begins, one after another, and the elements of a chunk."""
    begins, end = [], 0
    unit = _unit(specs[0])
    for spec in specs:
        begins.append(end)
        end = round_up(end + spec.numel, unit)
    return begins, round_up(max(1, -(-end // parts)), unit)


def _dealt(specs: Sequence[ParameterSpec], parts: int) -> tuple[list[int], int]:
    """As :func:`_in_a_row`, uncut: the largest first, each to the chunk that has the least."""
    unit = _unit(specs[0])
    filled = [0] * parts
    places = {}
    for number in sorted(range(len(specs)), key=lambda one: -specs[one].numel):
        part = filled.index(min(filled))
        places[number] = part, filled[part]
        filled[part] += round_up(specs[number].numel, unit)
    chunk = max(unit, *filled)
    return [places[number][0] * chunk + places[number][1] for number in range(len(specs))], chunk


def _unit(spec: ParameterSpec) -> int:
    return ALIGNMENT // spec.itemsize


def _padded(spec: ParameterSpec) -> int:
    return round_up(spec.numel * spec.itemsize, ALIGNMENT)


def _bytes(specs: Sequence[ParameterSpec], indices: Sequence[int]) -> int:
    return sum(_padded(specs[index]) for index in indices)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, each place once, in whatever order."""
    expected, pairs = 1, zip(tensor.stride(), tensor.shape, strict=True)
    for step, length in sorted((s, n) for s, n in pairs if n != 1):
        if step != expected:
            return False
        expected *= length
    return True

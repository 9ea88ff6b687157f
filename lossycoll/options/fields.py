"""The options of a group: one table for fields, variables, checks and documentation.

``Options(repair=1)`` as ``pg_options`` (a dict does as well) sets what is written; what is not
comes from ``LOSSYCOLL_<NAME>`` variables when the group is made, then from the defaults.
``python -m lossycoll.options.fields`` prints the table of docs/options.md.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import Field, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Final

from lossycoll.errors import OptionError
from lossycoll.plan import faults, parity

PREFIX: Final = "LOSSYCOLL_"
BUILD_VARIABLES: Final = frozenset({"LOSSYCOLL_WERROR", "LOSSYCOLL_CFLAGS"})
"""Read when the extension is built, so they may stand in a developer's environment."""
FAST_PATHS: Final = ("gso", "gro", "mmsg", "gather", "simd", "stamps")
MAX_BYTES: Final = 1 << 62


@dataclass(frozen=True)
class Kind:
    """How values of an option look. ``read`` takes a variable's text, ``check`` any value.

    Both return the value in its final type and raise ValueError or TypeError for a bad one.
    """

    allowed: str
    read: Callable[[str], Any]
    check: Callable[[Any], Any]


def _choice(*names: str) -> Kind:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind(" or ".join(f"`{name}`" for name in names), str.strip, check)


def _integer(low: int, high: int, *, allowed: str | None = None, zero: bool = False) -> Kind:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        if not (low <= value <= high or (zero and value == 0)):
            raise ValueError
        return value

    if allowed is None:
        top = f"2^{high.bit_length() - 1}" if high > 1 << 32 else str(high)
        allowed = f"{low} to {top}"
    return Kind(allowed, lambda text: int(text.strip(), 0), check)


def _number(low: float, high: float, unit: str) -> Kind:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError
        return float(value)

    return Kind(f"{low:g} to {high:g} {unit}", float, check)


def _share(least: float, word: str) -> Kind:
    """0, a share of at least ``least``, or a word."""
    number = _number(0, 1, "")

    def check(value: Any) -> float | str:
        if value == word:
            return word
        share: float = number.check(value)
        if 0 < share < least:
            raise ValueError
        return share

    def read(text: str) -> float | str:
        return word if text.strip() == word else float(text)

    return Kind(f"0, {least:g} to 1, or `{word}`", read, check)


def _text(allowed: str, check: Callable[[str], str]) -> Kind:
    def typed(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return check(value.strip())

    return Kind(allowed, str, typed)


def _check_interface(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _check_ports(text: str) -> str:
    if text != "0":
        low, high = (int(part) for part in text.split("-"))
        if not 1 <= low <= high <= 65535:
            raise ValueError
    return text


def _check_disable(text: str) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= set(FAST_PATHS):
        raise ValueError
    return ",".join(names)


def _check_inject(text: str) -> str:
    faults.parse(text)
    return text


def _option(
    default: Any, kind: Kind, meaning: str, *, agree: bool = False, per_call: bool = False
) -> Any:
    """``agree``: equal on all ranks, or the rendezvous refuses. ``per_call``: scopes may set it."""
    return field(
        default=default,
        metadata={"kind": kind, "meaning": meaning, "agree": agree, "per_call": per_call},
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a group behaves. Each field is a row of the table in docs/options.md.

    Raises OptionError for a value that isn't allowed, naming option, value and what is allowed.
    """

    algorithm: str = _option(
        "auto",
        _choice("auto", "ring", "transpose"),
        "Plan of all_reduce; auto is the transpose at every world and size: two steps rather than "
        "2 (N - 1), and a lost packet costs one contribution rather than a partial sum.",
        agree=True,
        per_call=True,
    )
    delivery: str = _option(
        "lossy",
        _choice("lossy", "reliable"),
        "lossy: all_reduce and reduce_scatter (SUM, AVG) of floats give up what is lost. "
        "reliable: nothing does.",
        agree=True,
        per_call=True,
    )
    repair: int = _option(
        0,
        _integer(0, 255),
        "Rounds of selective resending in lossy delivery.",
        agree=True,
        per_call=True,
    )
    fec: float | str = _option(
        0.0,
        _share(parity.LEAST_SHARE, "auto"),
        "Parity packets in lossy delivery, as a share of the others: 0.1 is one for each ten, of "
        "which it brings back one that is lost, without a round trip. auto: as the loss measured "
        "on each path asks, none where nothing is lost, at most 0.25 (engine.md).",
        agree=True,
        per_call=True,
    )
    lossy_min_bytes: int = _option(
        16384,
        _integer(0, MAX_BYTES),
        "Smaller tensors are reliable: they are control data more often than gradients.",
        agree=True,
        per_call=True,
    )
    bulk_min_bytes: int = _option(
        0,
        _integer(0, MAX_BYTES),
        "From this size on reliable collectives use the engine, smaller ones gloo. Gloo is faster "
        "for small broadcasts (figures in backend.md), but ends the process when ranks disagree on "
        "a size, where the engine raises an error that says so: hence 0.",
        agree=True,
        per_call=True,
    )
    on_missing: str = _option(
        "own",
        _choice("own", "keep", "zero"),
        "A reduced packet that never arrives becomes the rank's own contribution, stays as it was, "
        "or becomes zero (which is for comparisons: it shrinks what is trained with).",
        agree=True,
        per_call=True,
    )
    estimator: str = _option(
        "count",
        _choice("count", "inverse_probability", "zero_fill"),
        "count: the mean of what arrived, its sum divided by the number of contributions in it. "
        "inverse_probability: each contribution times 1 / (the rate at which its link delivers), "
        "divided by all ranks: for links that lose differently (theory.md). zero_fill: what is "
        "lost counts as zero; biased, for comparisons only.",
        agree=True,
        per_call=True,
    )
    deadline_min: float = _option(
        1.0, _number(1e-4, 3600, "s"), "Floor of the deadline learnt from arrivals."
    )
    deadline_max: float = _option(
        30.0,
        _number(1e-3, 3600, "s"),
        "How long a stream, or all that comes from a rank, may be silent before it is given up; in "
        "reliable calls that is a LinkError, after twice `liveness` if that is longer.",
    )
    reorder_min: float = _option(
        0.001,
        _number(1e-6, 1, "s"),
        "How long a stream waits at least for packets that come after its end. More is for "
        "networks, or busy machines, that reorder by more; each loss costs that long.",
    )
    interface: str = _option(
        "auto",
        _text("`auto`, an interface's name or a local address", _check_interface),
        "Where this rank sends and receives; auto is the interface that routes to the master.",
    )
    port_range: str = _option(
        "0",
        _text("`0` or `lo-hi`", _check_ports),
        "Local ports to use: a UDP and two TCP ports for each group; 0 lets the kernel choose.",
    )
    mtu: int = _option(
        0,
        _integer(576, 65535, allowed="0, or 576 to 65535 bytes", zero=True),
        "Largest IP packet; 0 takes the interface's, at most 9000. The group uses the smallest of "
        "its ranks'.",
    )
    socket_buffer: int = _option(
        0, _integer(0, (1 << 31) - 1), "Bytes asked for each direction; 0 asks for the most."
    )
    eager: int = _option(
        8 << 20,
        _integer(0, 1 << 32),
        "Bytes set aside for packets of ranks that are ahead of this one. So much is sent before "
        "the others are known to have called, which saves a one-way delay; 0 waits for their word.",
        agree=True,
    )
    disable: str = _option(
        "",
        _text("names of `gso,gro,mmsg,gather,simd,stamps`, with commas", _check_disable),
        "Fast paths that must not be used.",
    )
    pace: float = _option(
        0.0, _number(0, 1e12, "bytes/s"), "Fixed sending rate per rank; 0 is none."
    )
    inject: str = _option(
        "",
        _text("empty, or as in `loss=0.1,burst=8,dup=0.01,reorder=0.01,seed=7`", _check_inject),
        "Seeded faults, for tests and studies: a fraction of packets lost, doubled or delayed. "
        "`link=0-1:0.3` sets the loss from rank 0 to rank 1 of the group; it may be repeated.",
        agree=True,
    )
    seed: int = _option(
        0,
        _integer(0, (1 << 64) - 1, allowed="0 to 2^64-1"),
        "Draws owners and ring orders, anew for each operation.",
        agree=True,
    )
    futures: str = _option(
        "overlap",
        _choice("overlap", "in_order"),
        "in_order: `get_future()` waits for the result, so that what `.then` is given runs at "
        "once, on all ranks in the same order, and may issue collectives (PowerSGD's hook does).",
        agree=True,
    )
    liveness: float = _option(
        10.0,
        _number(0.5, 3600, "s"),
        "A rank that dies is named by an error on every other within this time.",
        agree=True,
    )
    on_peer_loss: str = _option(
        "raise",
        _choice("raise", "continue"),
        "raise: a rank that dies ends the group on all others, with an error that names it. "
        "continue: the others go on, means are over those that are left (survivors.md).",
        agree=True,
    )
    log: str = _option(
        "info",
        _choice("off", "warning", "info", "debug"),
        "What the logger `lossycoll` shows on standard error, unless logging is configured.",
    )
    _timeout: ClassVar[None] = None
    """Asked for by torch's DeviceMesh, of all backends' options; None is torch's own default."""

    def __hash__(self) -> int:
        """Formed once: every call looks something up by its options."""
        kept: int | None = self.__dict__.get("_hash")
        if kept is None:
            kept = hash(tuple(getattr(self, entry.name) for entry in fields(self)))
            object.__setattr__(self, "_hash", kept)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: another process hashes strings otherwise."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __new__(cls, **given: Any) -> Options:
        """Notes which fields were written: those beat the environment, defaults don't."""
        self = super().__new__(cls)
        object.__setattr__(self, "_given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        for entry in fields(self):
            checked = _check(entry, getattr(self, entry.name), f"option {entry.name}")
            object.__setattr__(self, entry.name, checked)
        if self.deadline_max < self.deadline_min:
            raise OptionError(
                f"option deadline_max is {self.deadline_max:g} s, wanted at least deadline_min, "
                f"{self.deadline_min:g} s"
            )

        if self.outlives and self.bulk_min_bytes:
            raise OptionError(
                f"option bulk_min_bytes is {self.bulk_min_bytes}, wanted 0 with "
                f"on_peer_loss='continue': gloo, which serves smaller calls, can't outlive a rank"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Options:
        """The effective options: ``explicit`` first, then ``environ`` (os.environ), then defaults.

        Raises OptionError for an unknown LOSSYCOLL_* variable or keyword, naming the nearest one
        there is, and for a value that isn't allowed.
        """
        environ = os.environ if environ is None else environ
        table = {entry.name: entry for entry in fields(cls)}
        for name in explicit:
            if name not in table:
                raise OptionError(_unknown("option", name, list(table)))
        variables = {variable(name): entry for name, entry in table.items()}
        values = dict(explicit)
        for name, text in environ.items():
            if not name.startswith(PREFIX) or name in BUILD_VARIABLES:
                continue
            entry = variables.get(name)
            if entry is None:
                raise OptionError(_unknown("variable", name, list(variables)))
            if entry.name not in explicit:
                values[entry.name] = _check(entry, _read(entry, text), f"variable {name}")
        return cls(**values)

    @classmethod
    def resolve(
        cls, pg_options: object = None, environ: Mapping[str, str] | None = None
    ) -> Options:
        """What a group uses, from what was passed as ``pg_options``: None, Options or a dict.

        Raises OptionError as :meth:`from_env` does, and for any other type.
        """
        if pg_options is None:
            return cls.from_env(environ)
        if isinstance(pg_options, Options):
            given: frozenset[str] = pg_options.__dict__["_given"]
            written = {name: getattr(pg_options, name) for name in given}
            return cls.from_env(environ, **written)
        if isinstance(pg_options, Mapping):
            return cls.from_env(environ, **{str(k): v for k, v in pg_options.items()})
        raise OptionError(
            f"pg_options is of type {type(pg_options).__name__}, wanted lossycoll.Options or a dict"
        )

    def is_given(self, name: str) -> bool:
        """Whether the option was written, or set by the environment."""
        return name in self.__dict__["_given"]

    @property
    def outlives(self) -> bool:
        """Whether the group goes on without ranks that are lost."""
        return self.on_peer_loss == "continue"

    @property
    def link_patience(self) -> float:
        """Seconds that a reliable call waits for a link that delivers nothing. A rank that is dead
        or stopped is found by ``liveness`` well before."""
        return max(self.deadline_max, 2 * self.liveness)

    @property
    def parity_sets(self) -> tuple[int, bool]:
        """How many packets a parity packet protects (0: there is none), and whether that is only
        the fewest, of which measured loss may ask for more."""
        if isinstance(self.fec, str):
            return parity.AUTO_SIZE, True
        return parity.size_of(self.fec), False

    @property
    def ports(self) -> tuple[int, int]:
        """(first, last) local port; (0, 0) for any."""
        if self.port_range == "0":
            return (0, 0)
        low, high = self.port_range.split("-")
        return (int(low), int(high))

    @property
    def disabled(self) -> tuple[str, ...]:
        """The fast paths that must not be used, by name."""
        return tuple(name for name in self.disable.split(",") if name)

    def shared(self) -> dict[str, Any]:
        """The options that all ranks of a group must agree on, by name."""
        return {e.name: getattr(self, e.name) for e in fields(self) if e.metadata["agree"]}


def variable(name: str) -> str:
    """The environment variable of an option."""
    return PREFIX + name.upper()


def _read(entry: Field[Any], text: str) -> Any:
    kind: Kind = entry.metadata["kind"]
    try:
        return kind.read(text)
    except ValueError:
        return text  # refused by the check, which says what is allowed


def _check(entry: Field[Any], value: Any, what: str) -> Any:
    kind: Kind = entry.metadata["kind"]
    try:
        return kind.check(value)
    except (ValueError, TypeError) as error:
        reason = f" ({error})" if str(error) else ""
        allowed = kind.allowed.replace("`", "")
        raise OptionError(f"{what} is {value!r}, wanted {allowed}{reason}") from None


def _unknown(what: str, name: str, known: list[str]) -> str:
    short = {entry.removeprefix(PREFIX).lower(): entry for entry in known}
    wanted = name.removeprefix(PREFIX).lower()
    near = difflib.get_close_matches(wanted, short, n=1, cutoff=0.4)
    hint = f"did you mean {short[near[0]]}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} {name}; {hint}"


# ---- blocks of code that change the delivery ----


@dataclass(frozen=True)
class Scope:
    """What a ``with`` block changes: option values, and whether copies may be lossy too."""

    changes: tuple[tuple[str, Any], ...]
    lossy_copies: bool


_scope: ContextVar[Scope | None] = ContextVar("lossycoll_scope", default=None)


def scope() -> Scope | None:
    """The innermost block that the caller is in, with what the outer ones changed as well."""
    return _scope.get()


@lru_cache(maxsize=256)
def within(options: Options, scope: Scope | None) -> Options:
    """The options of a group as the block ``scope`` changes them."""
    return options if scope is None else replace(options, **dict(scope.changes))


@contextlib.contextmanager
def _block(lossy_copies: bool, changes: Mapping[str, Any]) -> Iterator[None]:
    table = {entry.name: entry for entry in fields(Options)}
    for name in changes:
        if name not in table or not table[name].metadata["per_call"]:
            known = [n for n, entry in table.items() if entry.metadata["per_call"]]
            raise OptionError(_unknown("option of a block", name, known))
    checked = {n: _check(table[n], v, f"option {n}") for n, v in changes.items()}
    outer = _scope.get()
    merged = (dict(outer.changes) if outer else {}) | checked
    token = _scope.set(Scope(tuple(sorted(merged.items())), lossy_copies))
    try:
        yield
    finally:
        _scope.reset(token)


def reliable() -> contextlib.AbstractContextManager[None]:
    """A block in which no collective loses anything: ``with lossycoll.reliable(): ...``.

    It holds for calls made in this thread (or asyncio task) while the block is open, and must be
    opened on all ranks alike. A thread that is started inside it doesn't inherit it.
    """
    return _block(False, {"delivery": "reliable"})


def lossy(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which floats are reduced lossily, and broadcast and all_gather are lossy as well.

    ``changes`` are per-operation options: ``repair``, ``on_missing``, ``algorithm``,
    ``lossy_min_bytes``, ... A packet of a copy that never arrives leaves the buffer as it was.
    Threads and ranks as in :func:`reliable`. Raises OptionError for another name or a bad value.
    """
    delivery = changes.get("delivery", "lossy")
    if delivery != "lossy":
        raise OptionError(
            f"option delivery is {delivery!r} in a block of lossycoll.lossy(), wanted lossy; "
            f"lossycoll.reliable() opens a block without loss"
        )
    return _block(True, {**changes, "delivery": "lossy"})


# ---- documentation ----


def table() -> str:
    """The options as a Markdown table."""
    rows = [
        "| Option | Variable | Default | Allowed | Meaning | Equal on all ranks | Per block |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in fields(Options):
        meta = entry.metadata
        default = f"`{entry.default!r}`".replace("'", '"')
        marks = ["yes" if meta[key] else "" for key in ("agree", "per_call")]
        cells = [f"`{entry.name}`", f"`{variable(entry.name)}`", default, meta["kind"].allowed]
        rows.append("| " + " | ".join([*cells, meta["meaning"], *marks]) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

"""The options of a group: one table for fields, variables, checks and documentation.

``Options(repair=1)`` as ``pg_options`` sets what is written. What is not comes from
``LOSSYCOLL_<NAME>`` variables when the group is made, then from the defaults. A dict does as well
for ``init_process_group`` and ``new_group``, not for a mesh's ``backend_override``, which takes a
pair of the backend's name and Options.
tools/options_table.py prints them for docs/options.md.

Long because it is one table.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Final

from lossycoll.plan import algorithm_names, codec, sets
from lossycoll.plan.order import FINER_PACKETS, STREAM_PACKETS
from lossycoll.plan.registry import AUTO

from . import texts
from .schema import (
    PREFIX,
    Default,
    call_option,
    check,
    choice,
    growing_choice,
    integer,
    matching,
    number,
    one_of,
    option,
    read,
    refused,
    row,
    share,
    text,
    unknown,
    variable,
)

MOST_PARITY, MOST_TO_MEET = 16, 64
"""Packets of parity for 64 others: with fec="auto", and to meet max_missing."""
GIVEN: Final = "given"
"""Key of :meth:`Options.shared` under which a rank says which of these it was given."""
COUNT_AS_GIVEN: Final = ("delivery", "repair", "fec", "max_missing", "deterministic")
"""Options of which it counts for calls whether they were set, besides their values."""
PATH: Final = matching(
    "empty, or a path", "(/.*)?", "as in /usr/lib/x86_64-linux-gnu/libcrypto.so.3"
)
LABEL: Final = ".{0,64}", "at most 64 printable characters"
ALGORITHM_HINT: Final = "a plug-in's must be registered on every rank before its first group"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a group. Each field is a row of the table in docs/options.md.

    When a group is made, fields that you set (:attr:`given`) keep their values, and the
    environment's values replace the others. ``dataclasses.replace`` adds its changes to the fields
    that you set. Options are equal if they have the same values and the same fields set.

    Raises:
        OptionError: A name is unknown, or a value isn't allowed. The text names the nearest option,
            or option, value and what is allowed.
    """

    algorithm: str = call_option(
        "auto",
        growing_choice(algorithm_names, ALGORITHM_HINT, always=(AUTO,)),
        "Algorithm of collectives that have several (builders.md); others use their default. auto: "
        "hierarchical where ranks share hosts or sites (topology.md), else the default. For "
        "all_reduce that is the transpose at every world and size. Any other name ignores hosts.",
    )
    delivery: str = call_option(
        "lossy",
        choice("lossy", "reliable"),
        "lossy: all_reduce and reduce_scatter (SUM, AVG) of floats give up lost packets. reliable: "
        "nothing is given up.",
    )
    repair: int = call_option(
        0,
        integer(0, 255),
        "Rounds of selective resending in lossy delivery.",
    )
    fec: float | str = call_option(
        0.0,
        share(0.002, "auto"),
        "Share of parity packets in lossy delivery: 0.1 is six for sets of 64 (fewer in shorter "
        "streams), which restore any six lost packets without a round trip. auto: the share that "
        "the measured loss of each path needs, at most 0.25 (parity.md).",
    )
    max_missing: float | str = call_option(
        "none",
        share(0.0001, "none"),
        "Maximum share of missing packets in a lossy call. Each path uses parity or resending, "
        "whichever its measured loss and round trip make quicker. `fec` and `repair` keep their "
        "values. none: only `fec` and `repair` count (parity.md).",
    )
    stream_packets: int = call_option(
        STREAM_PACKETS,
        integer(0, 65535),
        "Packets per stream below which fewer ranks own parts of a short all_reduce, or of a short "
        "bucket of ShardedOptimizer, so that a burst doesn't take a whole stream. It applies "
        "with `max_missing` and `repair=0`. 0: all ranks own a part (plans.md).",
    )
    finer_packets: int = call_option(
        FINER_PACKETS,
        integer(1, 16),
        "Divisor of the packet size, at most, in short all_reduce and reduce_scatter calls, and "
        "for parameters of ShardedOptimizer, where parity alone meets `max_missing` (`repair` is "
        "0). A burst is then a smaller part of a stream. 1: packets have one size (parity.md).",
    )
    lossy_min_bytes: int = call_option(
        16384,
        integer(0, 1 << 62),
        "Smaller tensors are reliable and not encoded (`wire`): they are control data more often "
        "than gradients.",
    )
    wire: str = call_option(
        "same",
        choice(*codec.ENCODINGS, besides=codec.PAIRS, in_words="two such as `int4/int8`"),
        "Encoding of float32 in packets: unchanged, bfloat16, float16, or 8 to 2 bits by groups "
        "(also for float16 and bfloat16). In a pair, the first is for an all-reduce's "
        "contributions, the second for its means (wire.md). Sums are taken in float32. Reductions "
        "and gathers of floats and complex numbers are encoded.",
    )
    wire_group: int = call_option(
        codec.GROUPS[0],
        one_of(*codec.GROUPS),
        "Number of elements that share a grid of 40 bits, with `wire` from int8 to int2. Smaller "
        "groups have a smaller rounding error (wire.md).",
    )
    wire_spikes: int = call_option(
        0,
        integer(0, 1),
        "1: the smallest and the largest element of a group travel as floats, for 64 bits more, "
        "and the grid spans the others (wire.md).",
    )
    wire_rounding: str = call_option(
        codec.ROUNDINGS[0],
        choice(*codec.ROUNDINGS),
        "Rounding mode for int8 to int2: to the nearest value, or, for gradients, up or down at "
        "random such that the mean is the element (wire.md).",
    )
    on_missing: str = call_option(
        "own",
        choice("own", "keep", "zero"),
        "Value of a reduced packet that never arrives: the rank's own contribution, the old value, "
        "or zero (for comparisons: it shrinks gradients).",
    )
    estimator: str = call_option(
        "count",
        choice("count", "inverse_probability", "zero_fill"),
        "count: sum of the contributions that arrived, over their number. inverse_probability: sum "
        "of contributions times 1 / (their link's delivery rate), over the number of ranks; for "
        "links that lose differently (estimates.md). zero_fill: lost values count as zero; biased, "
        "for comparisons only.",
    )
    deterministic: int = call_option(
        0,
        integer(0, 1),
        "1: contributions are added in the order of ranks, so runs that lose the same packets give "
        "the same bits (engine-reference.md). Implied by "
        "`torch.use_deterministic_algorithms(True)` unless set.",
    )
    deadline_min: float = option(
        1.0,
        number(1e-4, 3600, "s"),
        "Floor of the deadline learnt from arrivals.",
    )
    deadline_max: float = option(
        30.0,
        number(1e-3, 3600, "s"),
        "Silence after which a stream, or a direction of a link, is given up. Reliable calls then "
        "raise a LinkError, after twice `liveness` if that is longer. Later lossy calls wait "
        "0.25 s and two round trips for a dead link.",
    )
    reorder_min: float = option(
        0.001,
        number(1e-6, 1, "s"),
        "Minimum wait for packets that come after a stream's end. Raise it for networks or busy "
        "machines that reorder by more; each loss costs this time.",
    )
    interface: str = option(
        "auto",
        matching("`auto`, an interface's name or a local address", ".+"),
        "Interface or address of this rank. auto: the interface that routes to the master.",
        of_host=True,
    )
    port_range: str = option(
        "0",
        text("`0` or `lo-hi`", texts.check_ports),
        "Local ports: each rank takes one UDP and one TCP port for all of its groups. 0: the "
        "kernel chooses.",
        of_host=True,
    )
    mtu: int = option(
        0,
        integer(576, 65535, allowed="0, or 576 to 65535 bytes", zero=True),
        "Largest IP packet. 0: the MTU of the route to the master, at most 9000. The group uses "
        "the smallest among its ranks; paths that carry less are found (packet-size.md).",
        of_host=True,
    )
    socket_buffer: int = option(
        0,
        integer(0, (1 << 31) - 1),
        "Bytes of socket buffer in each direction. 0: the most that the system allows.",
        of_host=True,
    )
    eager: int = option(
        8 << 20,
        integer(0, 1 << 32),
        "Bytes reserved for packets of ranks that are ahead of this one. Such packets are sent "
        "before this rank is known to have called, which saves a one-way delay. 0: senders wait.",
        agree=True,
        of_host=True,
    )
    disable: str = option(
        "",
        text(
            "some of `gso,gro,mmsg,gather,simd,stamps,path_mtu,stream_wait,device_wire,verbs`",
            texts.check_disable,
        ),
        "Fast paths that must not be used.",
        of_host=True,
    )
    pace: float = option(
        0.0,
        number(0, 1e12, "bytes/s"),
        "Fixed sending rate per rank. 0: none.",
        of_host=True,
    )
    pacing: str = option(
        "port",
        choice("path", "port"),
        "Unit that has a sending rate: the port that a host's paths share, or each path by itself "
        "(congestion.md).",
        of_host=True,
    )
    keepalive: float = option(
        10.0,
        number(0, 3600, "s"),
        "Idle time after which a network path gets a datagram, so that no firewall or NAT forgets "
        "it. 0: never (streams.md).",
        of_host=True,
    )
    inject: str = option(
        "",
        text("empty, or as in `loss=0.1,burst=8,dup=0.01,reorder=0.01,seed=7`", texts.check_inject),
        "Seeded faults, for tests and studies: shares of packets lost, duplicated or delayed. "
        "`link=0-1:0.3` sets the loss from rank 0 to rank 1 of the group; it may be repeated.",
        agree=True,
    )
    seed: int = option(
        0,
        integer(0, (1 << 64) - 1, allowed="0 to 2^64-1"),
        "Seed of the random owners and ring orders of operations.",
        agree=True,
    )
    futures: str = option(
        "overlap",
        choice("overlap", "in_order"),
        "in_order: `get_future()` waits for the result, so callbacks (`.then`) run at once, in the "
        "same order on all ranks, and may issue collectives (PowerSGD's hook does).",
        agree=True,
    )
    liveness: float = option(
        10.0,
        number(0.5, 3600, "s"),
        "Time within which a rank's death raises an error that names it on every other rank. The "
        "process has one value: its first group sets it, and a group that asks for another value "
        "is refused.",
        agree=True,
    )
    on_peer_loss: str = option(
        "raise",
        choice("raise", "continue"),
        "raise: a rank's death ends the group on all others, with an error that names it. "
        "continue: the survivors continue, and means are over them (survivors.md).",
        agree=True,
    )
    link: str = option(
        "auto",
        choice("auto", "udp"),
        "auto: shared memory within a machine, RDMA where it reaches the other rank (rdma.md), "
        "else UDP. udp: always UDP, and each rank counts as a host of its own (topology.md).",
        of_host=True,
    )
    verbs_device: str = option(
        "",
        matching(
            "empty, or as in `mlx5_0` or `mlx5_0:1`",
            r"([\w.-]+(:\d+)?)?",
            "as in mlx5_0 or mlx5_0:1",
        ),
        "RDMA port for packets to other machines. Empty: the interface's port, or InfiniBand's, "
        "if there is one (rdma.md).",
        of_host=True,
    )
    verbs_gid: int = option(
        -1,
        integer(-1, 255, allowed="-1, or 0 to 255"),
        "Index of the RDMA port's GID. -1: the one with the interface's address.",
        of_host=True,
    )
    libibverbs: str = option(
        "",
        PATH,
        "Path of the libibverbs library for RDMA devices. Empty: the system's.",
        of_host=True,
    )
    host: str = option(
        "",
        matching("empty, or a label", *LABEL),
        "Label that divides a machine: ranks with different labels share no memory and count as "
        "several hosts. Ranks of different machines never count as one.",
        of_host=True,
    )
    site: str = option(
        "",
        matching("empty, `auto`, or a label", *LABEL),
        "Location of this rank's machine. Between sites bandwidth is scarce, so partial sums "
        "cross once. auto: learnt from round trips between hosts (topology.md). Set it on all "
        "ranks or on none.",
        of_host=True,
    )
    seal: str = option(
        "encrypt",
        choice("encrypt", "authenticate"),
        "Protection of packets with a secret (`LOSSYCOLL_SECRET`): encrypt encrypts and "
        "authenticates them, authenticate only authenticates them (sealing.md).",
        agree=True,
        of_host=True,
    )
    cipher: str = option(
        "aes-128-gcm",
        choice(*texts.CIPHERS),
        "Cipher that seals packets; chacha20-poly1305 is for processors without AES instructions.",
        agree=True,
        of_host=True,
    )
    libcrypto: str = option(
        "",
        PATH,
        "Path of the OpenSSL library that seals packets. Empty: the process's or the system's "
        "(sealing.md).",
    )
    rekey: float = option(
        3600.0,
        number(0, 1e9, "s"),
        "Age at which a key is replaced. Keys are also replaced after 2^22 packets. 0: at no age.",
        of_host=True,
    )
    status: str = option(
        "on",
        choice("on", "off"),
        "on: each rank keeps a page that `lossycoll status` reads, even if Python hangs "
        "(operate.md). off: no page, and answers only say which rank it is.",
    )
    warn_after: float = option(
        30.0,
        number(0, 1e9, "s"),
        "Time after which a waiting call is logged with the ranks that it waits for, if it also "
        "takes ten times as long as usual. It is logged again after twice the time, and so on. 0: "
        "never. Needs `status` (operate.md).",
    )
    metrics: str = option(
        "",
        text("empty, as in `:9400` or `10.0.0.1:9400`, or a path", texts.check_metrics),
        "Address or file at which Prometheus finds the figures of a machine's ranks: a port, or a "
        "file for node_exporter, written every 10 s. A path that ends in `.jsonl` gets lines for "
        "`lossycoll report`. Needs `status` (monitor.md), and `lossycoll[metrics]` unless the path "
        "ends in `.jsonl`.",
    )
    replace: str = option(
        "",
        choice("gloo", besides=("",), in_words="empty"),
        "gloo: gloo groups that a program or framework makes, by name or by default, use lossy "
        "instead (backend.md). Read when torch is imported, so only from the environment.",
    )
    log: str = option(
        "info",
        choice("off", "warning", "info", "debug"),
        "Level of the logger `lossycoll` on standard error, unless logging is configured.",
    )
    _timeout: ClassVar[None] = None
    """Asked for by torch's DeviceMesh, of all backends' options; None is torch's own default."""

    def __new__(cls, *args: Any, **written: Any) -> Options:
        """Refuses a name that there isn't, with the nearest one, before ``__init__`` would."""
        del args
        known = [entry.name for entry in fields(cls)]
        for name in written:
            if (secret := PREFIX + name.upper()) in texts.SECRET_VARIABLES:
                raise refused(f"{name} is no option, since options are logged: set {secret}")
            if name not in known:
                raise unknown("option", name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for entry in fields(self):
            written = getattr(self, entry.name)
            value = check(entry, written, f"option {entry.name}")
            if not isinstance(written, Default):  # its type says that nobody has written it
                object.__setattr__(self, entry.name, value)
        if self.deadline_max < self.deadline_min:
            raise refused(
                f"option deadline_max is {self.deadline_max:g} s, wanted at least deadline_min, "
                f"{self.deadline_min:g} s"
            )

    def __eq__(self, other: object) -> bool:
        """Equal values, and the same of them set: what isn't set may be chosen by others."""
        return self._values == other._values if isinstance(other, Options) else NotImplemented

    def __hash__(self) -> int:
        return self._key

    @property
    def _values(self) -> tuple[list[Any], list[str]]:
        return [getattr(self, entry.name) for entry in fields(self)], sorted(self.given)

    @cached_property
    def _key(self) -> int:
        """Equal for equal options, and in every process, unlike the hash of a text: pickles take it
        along. Kept, since every call looks something up by its options."""
        return zlib.crc32(repr(self._values).encode())

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Options:
        """Return the options in effect: ``explicit`` before the environment before the defaults.

        Args:
            environ: The environment; None: the process's own.
            explicit: Options by name, as in ``Options(...)``.

        Returns:
            Options that count as given where they are explicit or in the environment.

        Raises:
            OptionError: A ``LOSSYCOLL_`` variable or a keyword is unknown (the text names the
                nearest known one), or a value isn't allowed.
        """
        environ = os.environ if environ is None else environ
        table = {entry.name: entry for entry in fields(cls)}
        variables = {variable(name): entry for name, entry in table.items()}
        values = dict(explicit)
        if explicit.get("replace", "") not in ("", environ.get(variable("replace"), "")):
            raise refused(
                f"option replace comes too late here: it is read when torch is imported, from "
                f"{variable('replace')}"
            )
        for name, written in environ.items():
            if not name.startswith(PREFIX) or name in texts.OTHER_VARIABLES:
                continue
            entry = variables.get(name)
            if entry is None and texts.OF_KUBERNETES.fullmatch(name):
                raise refused(
                    f"unknown variable {name}, which Kubernetes sets for a service whose name "
                    f"begins with 'lossycoll': write enableServiceLinks: false into the pod's "
                    f"spec, or give the service another name"
                )
            if entry is None:
                raise unknown("variable", name, [*variables, *texts.SECRET_VARIABLES])
            if entry.name not in explicit:
                values[entry.name] = check(entry, read(entry, written), f"variable {name}")
        return cls(**values)

    @classmethod
    def resolve(
        cls, pg_options: object = None, environ: Mapping[str, str] | None = None
    ) -> Options:
        """Return the options of a group.

        Args:
            pg_options: The user's argument of this name: None, Options or a dict.
            environ: As for :meth:`from_env`.

        Returns:
            The options in effect.

        Raises:
            OptionError: As for :meth:`from_env`, and for ``pg_options`` of another type.
        """
        if pg_options is None:
            return cls.from_env(environ)
        if isinstance(pg_options, Options):
            written = {name: getattr(pg_options, name) for name in pg_options.given}
            return cls.from_env(environ, **written)
        if isinstance(pg_options, Mapping):
            return cls.from_env(environ, **{str(k): v for k, v in pg_options.items()})
        raise refused(
            f"pg_options is of type {type(pg_options).__name__}, wanted lossycoll.Options or a dict"
        )

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the options that were set explicitly or by the environment."""
        names = [entry.name for entry in fields(self)]
        return frozenset(one for one in names if not isinstance(getattr(self, one), Default))

    def is_given(self, name: str) -> bool:
        """Return whether an option was set explicitly or by the environment.

        Args:
            name: The option's name.

        Returns:
            False if the option was not set, and so has its default.
        """
        return name in self.given

    @property
    def continues(self) -> bool:
        """True if the group continues with the survivors when ranks are lost."""
        return self.on_peer_loss == "continue"

    @property
    def link_timeout(self) -> float:
        """Seconds that a reliable call waits for a link that delivers nothing.

        A dead or stopped rank is found by ``liveness`` well before."""
        return max(self.deadline_max, 2 * self.liveness)

    @property
    def recovery(self) -> tuple[sets.Code, int, float]:
        """(code, most, max_missing) of recovery by parity. Without a fixed code, measured loss
        decides, and ``most`` bounds the parity packets per 64 packets (else 0). ``max_missing`` is
        -1 if it isn't set."""
        missing = -1.0 if isinstance(self.max_missing, str) else self.max_missing
        if isinstance(self.fec, str):
            return sets.NO_PARITY, MOST_PARITY, missing
        if missing >= 0 and not self.is_given("fec"):
            return sets.NO_PARITY, MOST_TO_MEET, missing
        return sets.code_of_share(self.fec), 0, missing

    @property
    def encoding(self) -> str:
        """Encoding of floats in packets: a name from plan.codec."""
        return codec.named(self.wire, self.wire_group, self.wire_spikes, self.wire_rounding)

    @property
    def chooses_rounds(self) -> bool:
        """True if measured loss decides the rounds of resending, too."""
        return not isinstance(self.max_missing, str) and not self.is_given("repair")

    @property
    def by_parity_alone(self) -> bool:
        """True if delivery is lossy, ``max_missing`` is set, and is met without resending."""
        bounded = self.delivery == "lossy" and not isinstance(self.max_missing, str)
        return bounded and self.is_given("repair") and not self.repair

    @property
    def ports(self) -> tuple[int, int]:
        """(first, last) local port, both included; (0, 0) for any."""
        low, _, high = self.port_range.partition("-")
        return (int(low), int(high or low))

    @property
    def disabled(self) -> tuple[str, ...]:
        """Names of the fast paths that must not be used."""
        return tuple(name for name in self.disable.split(",") if name)

    def shared(self) -> dict[str, Any]:
        """Return what all ranks of a group must agree on.

        Returns:
            The values of these options by name, and under ``given`` the names of those that were
            set, as far as calls depend on that.
        """
        same = {entry.name: getattr(self, entry.name) for entry in fields(self) if row(entry).agree}
        same[GIVEN] = " ".join(filter(self.is_given, COUNT_AS_GIVEN))
        return same

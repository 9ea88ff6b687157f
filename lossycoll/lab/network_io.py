"""Networks from files and from short texts of a command line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError
from .network import Network, changed, wrong
from .profiles import profile

PARTS: Final = ("link", "port", "wan", "gateway")
SHORT: Final = {
    **{name: f"{name}_ms" for name in ("delay", "jitter", "spread", "hold", "queue", "policer")},
    **{name: f"{name}_mbit" for name in ("up", "down")},
}
UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "ms": {"us": 1e-3, "ms": 1.0, "s": 1e3},
    "mbit": {"k": 1e-3, "m": 1.0, "g": 1e3},
    "": {"%": 1e-2},
}
"""Factor of each unit, by the end of a field's name."""
LINK_RATE: Final = ("rate_mbit",)
PORT_RATE: Final = ("up_mbit", "down_mbit")


def load(path: str | Path) -> Network:
    """Reads a network from JSON, or from TOML where Python has it (3.11). The form is that of
    :func:`as_data`; whatever is left out has its default. Raises OptionError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"can't read the network {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        at = f"byte {error.start}"
        raise OptionError(f"the network {path} isn't text in UTF-8 ({at}): save it so") from None
    try:
        data = _toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise OptionError(
            f"the network {path} isn't {path.suffix[1:] or 'JSON'}: {error}"
        ) from None
    return from_data(data)


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError:
        raise ValueError("this Python can't read TOML (3.11 can); write it as JSON") from None
    return tomllib.loads(text)


def as_data(network: Network) -> dict[str, Any]:
    """A network for json.dumps: links are named "0-1", ports by their host."""
    return {
        **asdict(network),
        "links": {f"{a}-{b}": asdict(link) for (a, b), link in network.links.items()},
        "ports": {str(host): asdict(port) for host, port in network.ports.items()},
    }


def from_data(data: Any) -> Network:
    """The opposite of :func:`as_data`. Links and ports that differ name only what differs. Raises
    OptionError for a name that isn't known and for a value that can't be."""
    if not isinstance(data, Mapping):
        raise wrong("a network", type(data).__name__, "an object")
    known = {entry.name for entry in fields(Network)}
    for name in data:
        if name not in known:
            raise OptionError(f"a network has no {name}; it has {', '.join(sorted(known))}")
    plain = {name: data[name] for name in data if name not in (*PARTS, "links", "ports")}
    if isinstance(plain.get("ranks"), list):
        plain["ranks"] = tuple(plain["ranks"])
    network = Network(**plain)
    for name in PARTS:
        part = changed(getattr(network, name), **_object(name, data.get(name, {})))
        network = replace(network, **{name: part})
    for text, part in _object("links", data.get("links", {})).items():
        network = network.with_link(pair(text), **_object(f"link {text}", part))
    for text, part in _object("ports", data.get("ports", {})).items():
        network = network.with_port(host(text), **_object(f"port {text}", part))
    return network


def _object(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(what, value, "an object")
    return value


def pair(text: str) -> tuple[int, int]:
    """The link "0-1". OptionError for any other text."""
    sender, dash, receiver = text.partition("-")
    if not (dash and sender.isdecimal() and receiver.isdecimal()):
        raise wrong("link", text, "SENDER-RECEIVER, as in 0-1")
    return int(sender), int(receiver)


def host(text: str) -> int:
    """A host's number. OptionError for any other text."""
    if not text.isdecimal():
        raise wrong("host", text, "its number")
    return int(text)


def values(text: str, rate: Sequence[str] = LINK_RATE) -> dict[str, Any]:
    """Fields of ``loss=1%,delay=20ms``, the same as ``loss=0.01,delay_ms=20``; "none" is None.
    ``rate``: the fields that "rate" stands for. OptionError for any other form."""
    out: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals:
            raise wrong("a change", part, "NAME=VALUE")
        for field in rate if name == "rate" else (SHORT.get(name, name),):
            out[field] = quantity(name, field, value)
    return out


def quantity(name: str, field: str, text: str) -> float | int | None:
    """A value of a field of links or ports, whose unit may stand behind it: ``1%``, ``20ms``.
    ``name``: what the error calls it. OptionError for what isn't a number, or isn't finite."""
    if text == "none":
        return None
    end = field.rpartition("_")[2]
    units = UNITS.get(end, UNITS[""])
    number, unit = text, 1.0
    for ending in sorted(units, key=len, reverse=True):
        if text.endswith(ending):
            number, unit = text.removesuffix(ending), units[ending]
            break
    try:
        found = float(number) * unit
    except ValueError:
        known = ", ".join(units)
        raise wrong(name, text, f"a number, and one of {known} or nothing behind it") from None
    if not math.isfinite(found):
        raise wrong(name, text, "a finite number")
    return int(found) if field == "queue_packets" and found.is_integer() else found


def wan(network: Network, text: str) -> Network:
    """A network with what ``rate=1g,delay=20ms`` says between its sites.

    The name of a profile may stand in front of that, or alone: its link and its port are then what
    is between. OptionError for what can't be read.
    """
    first, comma, rest = text.partition(",")
    if "=" not in first:
        like = profile(first.strip())
        network = replace(network, wan=like.link, gateway=like.port)
        if not comma:
            return network
        text = rest
    return network.with_wan(**values(text, PORT_RATE))

"""Networks from files and from short texts of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .network import Link, Network, Port, changed, wrong


def load(path: str | Path) -> Network:
    """Reads a network from JSON, or from TOML where Python has it (3.11).

    The form is that of :func:`as_data`; whatever is left out has its default. Raises OptionError.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"can't read the network {path}: {error.strerror}") from error
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
    links = {f"{a}-{b}": asdict(link) for (a, b), link in network.links.items()}
    ports = {str(host): asdict(port) for host, port in network.ports.items()}
    plain = {name: getattr(network, name) for name in ("hosts", "mtu", "seed")}
    return {
        **plain,
        "link": asdict(network.link),
        "port": asdict(network.port),
        "links": links,
        "ports": ports,
    }


def from_data(data: Any) -> Network:
    """The opposite of :func:`as_data`. Links and ports that differ name only what differs.

    Raises OptionError for a name that isn't known and for a value that can't be.
    """
    if not isinstance(data, Mapping):
        raise wrong("a network", type(data).__name__, "an object")
    known = {entry.name for entry in fields(Network)}
    for name in data:
        if name not in known:
            raise OptionError(f"a network has no {name}; it has {', '.join(sorted(known))}")
    link = changed(Link(), **_object("link", data.get("link", {})))
    port = changed(Port(), **_object("port", data.get("port", {})))
    links = {
        pair(text): changed(link, **_object(f"link {text}", part))
        for text, part in _object("links", data.get("links", {})).items()
    }
    ports = {
        host(text): changed(port, **_object(f"port {text}", part))
        for text, part in _object("ports", data.get("ports", {})).items()
    }
    plain = {name: data[name] for name in ("hosts", "mtu", "seed") if name in data}
    return replace(Network(**plain), link=link, port=port, links=links, ports=ports)


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


def values(text: str) -> dict[str, Any]:
    """What ``loss=0.1,delay_ms=5`` says; "none" is None. OptionError for any other form."""
    out: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise wrong("a change", part, "NAME=VALUE")
        try:
            number = None if value == "none" else float(value)
        except ValueError:
            raise wrong(name, value, "a number") from None
        whole = number is not None and name.strip() == "queue_packets" and number.is_integer()
        out[name.strip()] = int(number) if whole and number is not None else number
    return out

"""The table of algorithms of docs/builders.md: ``python -m tools.plans_table`` prints it."""

from __future__ import annotations

from typing import Final

from lossycoll.plan import algorithms

WORLDS: Final = (2, 8, 64)


def table() -> str:
    """The algorithms as a Markdown table, with what they cost at a few worlds."""
    worlds = ", ".join(str(world) for world in WORLDS)
    rows = [
        f"| Collective | Algorithm | What it does | Steps at {worlds} ranks | Traffic |",
        "|---|---|---|---|---|",
    ]
    for one in algorithms():
        auto = " (auto)" if one.default else ""
        name = f"`{one.name}`{auto}"
        steps = ", ".join(str(one.steps(world)) for world in WORLDS)
        traffic = ", ".join(f"{one.traffic(world):.3g}" for world in WORLDS)
        rows.append(f"| `{one.collective}` | {name} | {one.summary} | {steps} | {traffic} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

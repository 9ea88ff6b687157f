"""Picture of the packages in their layers, from the import contracts of pyproject.toml.

``python -m tools.layers_picture`` writes docs/layers.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import tomllib

ROOT: Final = Path(__file__).resolve().parents[1]
PICTURE: Final = ROOT / "docs" / "layers.svg"
ROW, WIDTH, MARGIN = 34, 720, 12
LABEL: Final = 110
"""Width of the column with a layer's name; its parts stand to its right."""


def layers_of(container: str) -> list[list[str]]:
    """The layers of a package, the highest first; names in one layer import none of each other."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [container]:
            return [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    raise KeyError(container)


def _box(x: int, y: int, width: int, height: int, text: str, fill: str) -> list[str]:
    middle = y + height // 2 + 5
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}"/>',
        f'<text x="{x + width // 2}" y="{middle}" text-anchor="middle">{text}</text>',
    ]


def picture() -> str:
    """The picture as SVG: a row per layer, and within a row the layers of its package."""
    drawn: list[str] = []
    y = MARGIN
    for row in [*layers_of("lossycoll"), ["native (C)"]]:
        (name,) = row
        package = f"lossycoll.{name}"
        try:
            inner = layers_of(package)
        except KeyError:
            inner = []
        height = ROW * max(1, len(inner)) - 4
        drawn += _box(MARGIN, y, LABEL, height, name, "#c9d9f0")
        for at, parts in enumerate(inner):
            width = (WIDTH - LABEL - 2 * MARGIN - 4) // len(parts)
            for place, part in enumerate(parts):
                x = MARGIN + LABEL + 4 + place * width
                drawn += _box(x, y + at * ROW, width - 4, ROW - 4, part, "#e8eef7")
        y += height + 4
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN}" '
        f'font-family="sans-serif" font-size="13" fill="#1b2a41">'
    )
    title = "<title>Layers of lossycoll: imports only point down</title>"
    return "\n".join([head, title, *drawn, "</svg>", ""])


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()

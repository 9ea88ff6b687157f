"""Configuration of the site: `make site` builds it with Sphinx, MyST and furo.

The source is the repository itself, so that links between pages are those that work in a clone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]

project = "lossycoll"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
copyright = "lossycoll contributors"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "tools/README.md",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # GitHub's anchors, which tests/repository/test_links.py checks
nitpicky = True
suppress_warnings = [
    "misc.highlighting_failure",  # signatures with <class '...'> in docs/api.md
]
html_theme = "furo"
html_title = f"lossycoll {version}"
html_show_sphinx = False
html_copy_source = False
html_use_index = False  # nothing is declared for it: its page would be empty
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def to_start(app: Any, failed: Exception | None) -> None:
    """The site's own index leads to the page in docs/."""
    if failed is None and app.builder.name == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("build-finished", to_start)

"""The site: its tree has every page, it builds without a warning, and a browser can search it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)
FENCED = re.MULTILINE | re.DOTALL
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def tree() -> dict[str, list[str]]:
    """The pages of each part of the site."""
    parts = {}
    for text in TREE.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        (caption,) = re.findall(r":caption: (\w+)", text)
        lines = [line for line in text.splitlines() if line and line[0] != ":"]
        parts[caption] = [re.sub(r"^.* <(.*)>$", r"\1", line) for line in lines]
    return parts


def words(page: str) -> int:
    """How many words a page has, as ``wc -w`` counts: with its code and its tables' rules."""
    return len((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())


def spoken(page: str) -> int:
    """Those of them that have a letter or a digit."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return len(re.findall(r"\S*\w\S*", text))


def test_pages_are_short() -> None:
    parts = tree()
    short = [*parts["Start"], *parts["Guides"], *parts["Explanation"]]
    assert {page: count for page in short if (count := words(page)) > 1500} == {}
    looked_up = [page for page in parts["Reference"] if page not in ("api", "../CHANGELOG")]
    assert sum(map(spoken, [*short, *looked_up])) <= 70_000


WIDEST = 120
"""Columns of a line of text: tables, code, pictures and what reports write are longer."""


def test_lines_of_text_are_short() -> None:
    marked = re.compile(r"<!-- ([^>]+): begin -->.*?<!-- \1: end -->|^```.*?^```", FENCED)
    wide = {}
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = marked.sub("", path.read_text(encoding="utf-8"))
        lines = [line for line in text.splitlines() if not re.match(r"\||    |!\[", line)]
        if path.stem != "api" and any(len(line) > WIDEST for line in lines):
            wide[path.name] = max(lines, key=len)
    assert wide == {}


def test_each_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    """A row that is wrapped like text ends the table."""
    for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=FENCED)
        for head, body in re.findall(r"^(\|(?: *:?-+:? *\|)+)\n((?:.+\n?)*)", text, re.MULTILINE):
            for row in body.splitlines():
                # What ends a table without a blank line is a mark.
                if not row.startswith("<!--"):
                    cells = re.findall(r"(?<!\\)\|", row)
                    assert len(cells) == head.count("|"), f"{path.name}: {row}"


def test_users_pages_name_neither_tests_nor_commits() -> None:
    """Commands that run tests are code, and contributors' pages are excepted."""
    parts = tree()
    found = {}
    for page in {*parts["Start"], *parts["Guides"], *parts["Explanation"]} - {"../CONTRIBUTING"}:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        text = re.sub(r"^```.*?^```|^ {4}.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
        names = re.findall(r"\btest_\w+|\bcommit [0-9a-f]{7,40}\b", text)
        names += re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,12}\b", text)
        if names:
            found[page] = names
    assert found == {}


def test_every_page_is_in_the_tree_once() -> None:
    parts = tree()
    assert list(parts) == ["Start", "Guides", "Reference", "Explanation", "Studies"]
    entries = [page for pages in parts.values() for page in pages]
    assert len(entries) == len(set(entries))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages == {entry for entry in entries if not entry.startswith("../")}
    for entry in entries:
        assert (ROOT / "docs" / f"{entry}.md").exists(), entry


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="requirements-site.txt is not installed")
    pytest.importorskip("myst_parser", reason="requirements-site.txt is not installed")
    out = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html")
    done = subprocess.run(
        [*command, "-c", "docs", ".", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return out


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server of the folder: search fetches pages, which files don't allow."""
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not reported."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning(site: Path) -> None:
    built = {path.stem for path in (site / "docs").glob("*.html")}
    assert built == {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert "url=docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_pages_and_searches(site: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="requirements-release.txt")
    errors: list[str] = []
    pictures = os.environ.get("SCREENSHOTS", "")  # of `make screenshots`
    with served(site) as address, sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        backgrounds = {}
        for size, scheme in product((WIDE, NARROW), ("light", "dark")):
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            for name in sorted(path.stem for path in (site / "docs").glob("*.html")):
                page.goto(f"{address}/docs/{name}.html")
                wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                assert wider <= 0, f"{name} is {wider} pixels wider than {size['width']}"
                broken = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
                assert page.evaluate(broken) == [], name
                narrow = (
                    "[...document.querySelectorAll('td')].filter(c => c.offsetWidth < 90).length"
                )
                assert size is WIDE or page.evaluate(narrow) == 0, name
                if pictures:
                    kind = "wide" if size is WIDE else "narrow"
                    file = Path(pictures) / f"{name}-{kind}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
            backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            hidden = page.evaluate(
                "document.querySelector('.sidebar-drawer').getBoundingClientRect().right <= 0"
            )
            assert hidden == (size is NARROW)
        assert backgrounds["light"] != backgrounds["dark"]

        page.set_viewport_size(WIDE)
        page.fill("input.sidebar-search", "DriftBound")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results li a", timeout=120_000)
        with page.expect_navigation():
            page.click("#search-results li a >> nth=0")
        assert "DriftBound" in page.inner_text("main, article")
        browser.close()
    assert errors == []

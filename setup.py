"""Builds what is written in C, and the long description; all else stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup


def long_description() -> str:
    """README.md as an index shows it: without pictures of the repository and links into it."""
    text = (Path(__file__).resolve().parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|mailto:)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        cffi_modules=[f"native/build_cffi.py:{name}" for name in ("ffi", "lab", "sim")],
        # cffi builds against the stable ABI by itself; this says so in the wheel's name, so that
        # one wheel serves every CPython from this version on.
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )

"""Builds what is written in C; all else stands in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[f"native/build_cffi.py:{name}" for name in ("ffi", "lab", "sim")],
    # cffi builds against the stable ABI by itself; this says so in the wheel's name, so that one
    # wheel serves every CPython from this version on.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

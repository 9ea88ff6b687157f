"""Builds the native engine; everything else stands in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["native/build_cffi.py:ffi"])

"""The laboratory of bad networks, from a source tree: ``python -m tools.netlab``."""

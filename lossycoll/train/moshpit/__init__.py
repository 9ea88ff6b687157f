"""Averaging in a swarm (docs/swarms.md)."""

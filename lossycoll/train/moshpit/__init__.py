"""Averaging in a swarm (docs/moshpit.md)."""

"""Collectives timed beside gloo's."""

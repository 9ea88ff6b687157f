"""Parity and resending: what is left of a loss, and what that costs."""

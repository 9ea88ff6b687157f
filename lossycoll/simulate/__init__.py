"""Training predicted before it runs: what waiting for the slowest rank costs, and what not waiting
gains. numpy alone: no torch, no sockets, no clock."""

from .threshold import Choice, Cut, Point, choose

__all__ = ["Choice", "Cut", "Point", "choose"]

"""Gain of a threshold of compute time, predicted from recorded times or from a distribution.

``times`` checks recorded times, and reads files of them. ``threshold`` chooses by them, also for
another number of ranks. ``theory`` has distributions of a micro-batch's time, and the formulas.
Beside them stands ``averaging`` (rounds that a swarm needs). numpy alone: no torch, no
sockets, no clock.
"""

from .threshold import Choice, choose

__all__ = ["Choice", "choose"]

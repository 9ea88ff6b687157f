"""2,000 steps and three seeds: ARC-Top-K beside PowerSGD where both send as many bytes.

Ranks of one machine over loopback, reliably: what is learned and what is sent, but no times.
``tasks`` is what is trained, ``variants`` how gradients travel, ``rank`` one rank, ``report`` and
``plot`` what is said of it.
"""

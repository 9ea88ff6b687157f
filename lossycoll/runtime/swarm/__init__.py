"""Peers that average in small groups without a fixed world (docs/swarms.md).

``directory`` decides who meets whom, as a state machine; ``protocol`` has what it and peers say,
``server`` and ``client`` carry that. ``member`` is a peer: an engine, and rounds of averaging.
"""

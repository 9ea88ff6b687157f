"""torch's own conformance suite for backends, run against gloo and against lossy, test by test.

``python -m conformance`` (with tests/ on the path) writes docs/conformance.md.
"""

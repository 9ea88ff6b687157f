"""torch's own conformance suite for backends, run against gloo and against lossy, test by test.

``python -m tests.conformance`` writes docs/conformance.md.
"""

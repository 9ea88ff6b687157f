"""What losing packets costs a trained model: ``python -m benchmarks quality``
(docs/quality.md)."""

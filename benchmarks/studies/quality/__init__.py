"""What losing packets costs a trained model: ``python -m benchmarks.studies.quality.measure``
(docs/quality.md)."""

"""What losing packets costs a trained model: ``python -m benchmarks.studies.quality``
(docs/quality.md)."""

"""DropCompute: stop a late rank's micro-batches and average what is done (docs/dropcompute.md)."""

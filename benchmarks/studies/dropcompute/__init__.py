"""DropCompute with injected compute delays: what it was predicted to gain, and what it did."""

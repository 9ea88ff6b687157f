"""Communication hooks for DistributedDataParallel, one in each module."""

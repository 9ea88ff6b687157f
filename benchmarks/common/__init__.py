"""Results on disk, laboratory jobs, TCP's congestion control."""

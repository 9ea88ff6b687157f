"""What all studies share: results on disk, the resumable runner, reports, laboratory jobs."""

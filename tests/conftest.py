"""What holds for every test."""

import os

# Before torch is imported: with more, the threads of a few processes wait for one another's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

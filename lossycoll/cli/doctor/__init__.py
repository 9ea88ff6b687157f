"""Report of what this machine can do, and what to change."""

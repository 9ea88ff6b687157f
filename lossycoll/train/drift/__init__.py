"""The drift of replicas under DDP: measured, and bounded."""

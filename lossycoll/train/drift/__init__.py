"""The drift of replicas under DDP: measured, and bounded.

measure has measure_drift. bound has DriftBound, which after each step brings a slice of the
parameters (slices) to one value on all ranks, and notices silent owners.
"""

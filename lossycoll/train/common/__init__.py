"""Common base of all methods of training.

collectives is the only way to send anything, delivery what methods ask of it; consistency compares
what ranks must have alike. layout has buckets as data, models who holds what of a model, packing a
state as bytes.
"""

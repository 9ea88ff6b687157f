"""Common base of all methods of training.

collectives is the only way to send anything; consistency compares what ranks must have alike.
layout has buckets as data, staleness how old values are, replicas who holds what of a model, wire
and recovery how it travels, packing a state as bytes.
"""

"""Measurements of the network between two hosts, by a doctor at each end."""

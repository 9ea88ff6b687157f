"""The network between two hosts, measured by a doctor at each end."""

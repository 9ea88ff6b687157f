"""What the network between two hosts does, measured by a doctor at each end."""

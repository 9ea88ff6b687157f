"""Point to point: send and recv over connections of the group's own."""

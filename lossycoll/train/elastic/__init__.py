"""Training whose ranks die and come back: groups that are made anew between two steps."""

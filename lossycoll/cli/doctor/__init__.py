"""``lossycoll doctor``: abilities of this machine, and remedies."""

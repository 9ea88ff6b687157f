"""Measurements, kept apart from the package: nothing in lossycoll imports them."""

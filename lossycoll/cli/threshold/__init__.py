"""``lossycoll plan-threshold``: a threshold for DropCompute from recorded compute times."""

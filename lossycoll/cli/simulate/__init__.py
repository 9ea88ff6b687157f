"""``lossycoll simulate``: collectives, training, swarms and control planes, predicted."""

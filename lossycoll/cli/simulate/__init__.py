"""``lossycoll simulate``: predictions, part by part."""

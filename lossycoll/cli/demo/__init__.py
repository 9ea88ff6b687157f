"""A small GPT trained with gloo and with lossy, compared."""

"""One table of options, read by every layer above: from the environment, from code, per scope."""

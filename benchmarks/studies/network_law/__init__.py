"""The rates that the engine finds, over a table of networks, in virtual time."""

"""Who gets how much of a link that several use."""

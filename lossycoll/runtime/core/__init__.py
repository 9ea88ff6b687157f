"""Base of all parts of the runtime: calls as data, and log lines."""

"""What every part of the runtime shares: calls as data, and log lines."""

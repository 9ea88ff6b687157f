"""Programs that answer one question in seconds, some of them in C."""

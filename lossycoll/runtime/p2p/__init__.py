"""Point to point: sends and receives as the engine's messages."""

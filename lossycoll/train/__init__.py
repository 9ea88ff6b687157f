"""What a training script adds, beyond the name of the backend."""

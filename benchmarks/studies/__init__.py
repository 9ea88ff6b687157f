"""What takes minutes to hours and is resumed where it was stopped."""

"""What all methods of training stand on."""

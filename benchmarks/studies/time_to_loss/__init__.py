"""Time to a validation loss on bad networks: this backend beside gloo."""

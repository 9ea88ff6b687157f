"""What the native engine must compute, in numpy: the reference that tests compare it with."""

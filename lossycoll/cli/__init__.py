"""Command line of lossycoll."""

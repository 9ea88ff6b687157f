"""One rank without torch: collectives and messages over membership, network and engine."""

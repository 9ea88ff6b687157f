"""One rank's endpoint for collectives: what is planned, in which order, and by what estimator."""

"""torch's calls in, collectives and messages out."""

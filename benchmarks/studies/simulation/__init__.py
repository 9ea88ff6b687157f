"""The simulator beside the laboratory: times, and what is missing."""

"""Deadlines learnt from arrivals, beside the best fixed deadline in hindsight."""

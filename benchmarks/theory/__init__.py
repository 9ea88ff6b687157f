"""The formulas of docs/theory.md and docs/dropcompute.md beside what is measured."""

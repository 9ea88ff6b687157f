"""The secret that ranks share, and what is sealed with it. docs/sealing.md says how."""

"""Who is in the group, who is alive, who is left, and what failed."""

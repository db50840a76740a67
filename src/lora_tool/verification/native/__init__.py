"""The comparison in C, and what loads it."""

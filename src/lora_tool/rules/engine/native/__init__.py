"""The scan of weights in C, and what loads it."""

"""The arithmetic of a merge: one module per backend, chosen in one place."""

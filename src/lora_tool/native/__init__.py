"""The compiled arithmetic of `--precision float32`: its sources, and how it is found and called."""

"""LT3xx of a model folder: head and vocabulary."""

"""Quantised weights on disk: their names, their layouts, and the matrices that they encode."""

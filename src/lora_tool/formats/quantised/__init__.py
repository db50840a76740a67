"""Quantised weights on disk: what they are called, how they are laid out, and the matrices that they stand for."""

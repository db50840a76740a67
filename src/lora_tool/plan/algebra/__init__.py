"""Adapters as numbers: sums of them, smaller ones, and the forms that servers read; ΔW is never formed."""

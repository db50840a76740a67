"""Arithmetic on adapters: sums, lower ranks, and the forms that servers read, without forming ΔW."""

"""Judging a checkpoint: one small documented rule per disease, and the loop that asks them all."""

"""Judging a checkpoint: one small documented rule per disease, and `validate`, which asks them all."""

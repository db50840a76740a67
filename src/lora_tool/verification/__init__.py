"""Proof of what was written: a second reading and a second formula, sharing nothing with the writer's arithmetic."""

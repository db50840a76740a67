"""The contents of an adapter and their effect on a model, computed in one place."""

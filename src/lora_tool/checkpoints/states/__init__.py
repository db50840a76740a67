"""The training state that the rank files of a run hold, and what is wrong with it."""

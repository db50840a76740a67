"""The training state in the rank files of a run, and its faults."""

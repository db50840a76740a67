"""The parts of the base model that a merge takes besides its weights."""

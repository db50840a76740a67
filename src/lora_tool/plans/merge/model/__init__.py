"""The model that a merge is planned on: its class, its task, and the names of its parameters, decided once."""

"""The changes that the adapters of a merge make, as terms."""

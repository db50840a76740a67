"""What the adapters of a merge do, as terms."""

"""What an adapter is and does, computed in one place."""

"""What an adapter is and does, computed once for everybody."""

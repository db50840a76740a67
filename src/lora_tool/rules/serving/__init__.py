"""LT8xx: an adapter for a server."""

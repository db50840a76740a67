"""LT1xx: the files themselves."""

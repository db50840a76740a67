"""LT4xx and LT7xx: rank files and training runs."""

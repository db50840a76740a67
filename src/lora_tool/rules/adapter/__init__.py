"""LT2xx, LT3xx and LT5xx: an adapter, its head, and its base."""

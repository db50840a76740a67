"""Bytes to tables and typed configs. Each module knows one file format and nothing of the others' meaning."""

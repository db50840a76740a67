"""Asking every rule about a folder."""

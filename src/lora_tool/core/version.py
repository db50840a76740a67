"""The version, as a constant: asking importlib.metadata for it takes longer than validating an adapter."""

__version__ = "0.1.0"

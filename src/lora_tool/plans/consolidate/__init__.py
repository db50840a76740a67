"""Rank files → the plan of an adapter, a model or a state dict."""

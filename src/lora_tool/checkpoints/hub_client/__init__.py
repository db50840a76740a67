"""Calls of huggingface_hub's client: bounded in time, without secrets in messages, failures as our own errors."""

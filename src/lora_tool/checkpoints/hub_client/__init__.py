"""How huggingface_hub's client is asked, by whoever asks: bounded, without secrets, its failures in our words."""

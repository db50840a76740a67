"""Megatron's checkpoints: the kind and the reader of its LoRA, which enter lora-tool by an entry point."""

"""What transformers' models are called and what their heads and ends are called."""

from lora_tool.models.table import ARCHITECTURES, Architecture, architecture_of, is_computed

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "is_computed"]

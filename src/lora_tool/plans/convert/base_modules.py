"""The modules of an adapter's base model, which say what a name without a prefix means."""

from __future__ import annotations

from importlib.util import find_spec

from lora_tool.checkpoints import ModelDir
from lora_tool.core.keys import PREFIX
from lora_tool.core.progress import decided
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.models.module_names import ModuleNames, module_names
from lora_tool.plans.base.task import auto_class_for


def modules_of(base: ModelDir | None, adapter: AdapterConfig) -> ModuleNames | None:
    """Return the modules of the base as the adapter's class has them: by the tables, else by transformers' own class.

    None without a base, for models of custom code, and where transformers is needed and not installed or cannot tell.
    """
    if base is None or base.config is None:
        return None
    known = module_names(base.config, base.tensors, adapter)
    if known is not None or base.config.custom_code or not _can_ask():
        return known
    from lora_tool.models.mapping.modules import built_modules

    decided(f"names: transformers says which modules a {base.config.model_type} has")
    own = adapter.trained_class or (None if adapter.task_type else next(iter(base.config.architectures), None))
    return built_modules(base.whole_config, base.tensors, own, auto_class_for(adapter.task_type))


def way_out(model_type: str | None) -> str:
    """Return the hint for names that only the modules of such a base would explain, where they are not known."""
    if _can_ask():
        return f"write the whole names into the file: {PREFIX}<module>.lora_A.weight"
    return f"install transformers, which knows the modules of a {model_type}: pip install 'lora-tool[merge]'"


def _can_ask() -> bool:
    return all(map(find_spec, ("torch", "transformers")))

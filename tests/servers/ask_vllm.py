"""What the vLLM of this Python takes, as JSON: its parser, its reader of adapter_config.json, and its models' classes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tests.servers.classes import Class, Source
from tests.servers.fields import ASKED

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
MODELS = "vllm.model_executor.models"
DRAFTS = "_SPECULATIVE_DECODING_MODELS"
"""Models that only guess ahead for another, which no adapter is for."""


def reactions() -> dict[str, str | None]:
    """Return what vLLM does with each field; None where it applies it."""
    from vllm.lora.peft_helper import PEFTHelper

    found: dict[str, str | None] = dict.fromkeys(ASKED)
    for name, value in ASKED.items():
        if refuses({name: value}):
            found[name] = "refuses"
        elif name not in PEFTHelper.__dataclass_fields__:
            found[name] = "ignores"
    if found.get("lora_bias") == "ignores" and not is_read("model.layers.0.q_proj.lora_B.bias"):
        found["lora_bias"] = "does not load"
    if not is_read("model.embed_tokens.token_adapter.trainable_tokens_delta"):
        found["trainable_token_indices"] = "refuses"
    return found


def refuses(fields: dict[str, Any]) -> bool:
    """Return whether vLLM refuses an adapter with these fields in its config."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    try:
        PEFTHelper.from_dict({"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}).validate_legal(
            LoRAConfig()
        )
    except ValueError:
        return True
    return False


def is_read(name: str, prefix: str = "base_model.model.") -> bool:
    """Return whether vLLM reads a tensor of this name."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    try:
        module, _ = parse_fine_tuned_lora_name(f"{prefix}{name}")
    except ValueError:
        return False
    return bool(name.startswith(module))


def options() -> list[str]:
    """Return the options of `vllm serve` that begin adapters: those of the engine, and `--lora-modules`."""
    from vllm.engine.arg_utils import EngineArgs

    parser_of = next(
        getattr(importlib.import_module(module), name)
        for module, name in (
            ("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
            ("vllm.utils", "FlexibleArgumentParser"),
        )
        if _has(module, name)
    )
    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(parser_of())
    found = {option for action in parser._actions for option in action.option_strings if "lora" in option}
    sources = (Path(sys.modules["vllm"].__path__[0]) / "entrypoints").rglob("cli_args.py")
    if any("lora_modules:" in path.read_text(encoding="utf-8") for path in sources):
        found.add("--lora-modules")
    return sorted(option for option in found if option.startswith("--") and not option.startswith("--no-"))


def _has(module: str, name: str) -> bool:
    with contextlib.suppress(ImportError):
        return hasattr(importlib.import_module(module), name)
    return False


def model_classes(source: Source) -> dict[str, Any]:
    """Return the names that config.json's `architectures` may have, by what LoRA vLLM has for them."""
    plain, without, stacks, whole = set(), set(), set(), set()
    ends: dict[str, set[str]] = {}
    for group, name, each in registered(source):
        if not any(above.name == "SupportsLoRA" for above in source.lineage(each)):
            without.add(name)
            continue
        plain.add(name)
        value = source.attribute(each, "embedding_modules")
        modules = [] if value is None else list(ast.literal_eval(value))
        for module in modules:
            ends.setdefault(module, set()).add(name)
        if group == "_MULTIMODAL_MODELS" and not modules:
            whole.add(name)
        if ast.unparse(source.attribute(each, "is_3d_moe_weight") or ast.Constant(value=False)) == "True":
            stacks.add(name)
    return {
        "plain": sorted(plain),
        "without": sorted(without - plain),
        "ends": {module: sorted(names) for module, names in sorted(ends.items())},
        "ends_unknown": sorted(whole),
        "stacks": sorted(stacks),
        "endings": endings(source),
    }


def registered(source: Source) -> Iterator[tuple[str, str, Class]]:
    """Yield each name of the registry with its group and its class."""
    registry = source.module(f"{MODELS}.registry")
    assert registry is not None
    for group, value in registry.values.items():
        if not group.endswith("_MODELS") or group == DRAFTS or not isinstance(value, ast.Dict):
            continue
        for key, place in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(place, ast.Tuple):
                module, name = ast.literal_eval(place)
                path = module if module.startswith("vllm.") else f"{MODELS}.{module}"
                found = source.found(path, name)
                if found is None:
                    print(f"no class {name} in {path}", file=sys.stderr)
                else:
                    yield group, str(key.value), found


def endings(source: Source) -> list[str]:
    """Return the ends of class names that vLLM replaces by one another to find a class that it has."""
    config = source.module("vllm.config.model")
    table = None if config is None else config.values.get("_SUFFIX_TO_DEFAULTS")
    return [name for name, _ in ast.literal_eval(table)] if table is not None else []


def main() -> None:
    import vllm
    from vllm.config.lora import LoRAConfig, MaxLoRARanks

    source = Source(Path(vllm.__path__[0]))
    found = {
        "version": str(vllm.__version__).partition("+")[0],
        "fields": dict(sorted(reactions().items())),
        "heads": not refuses({"modules_to_save": ["score"]}),
        "ranks": list(get_args(MaxLoRARanks)),
        "default_rank": LoRAConfig.max_lora_rank,
        "adapter_names": is_read("model.layers.0.q_proj.lora_A.default.weight"),
        "bare_names": is_read("model.layers.0.q_proj.lora_A.weight", ""),
        "classes": model_classes(source),
    }
    print(json.dumps({"record": found, "options": options()}))


if __name__ == "__main__":
    main()

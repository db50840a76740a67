"""The grammar of PEFT's tensor names.

A LoRA tensor is called ``base_model.model.<module path>.<part>[.<adapter name>][.<leaf>]``, for example
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``. `save_pretrained` takes the adapter name out; a raw
`state_dict`, or a ZeRO checkpoint, still has it (``lora_A.default.weight``). Everything that is not a LoRA part is the
plain name of a tensor of the model, as `modules_to_save` and saved biases are (peft 0.21,
`peft/utils/save_and_load.py::get_peft_model_state_dict`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from msgspec import Struct

PREFIX = "base_model.model."
"""What `PeftModel` puts before every name: its own `base_model`, then `LoraModel`'s `model`."""


@enum.unique
class Part(str, enum.Enum):
    """Which piece of an adapted module a tensor is."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    TOKENS_DELTA = "trainable_tokens_delta"
    TOKENS_BASE = "token_adapter.base_layer"
    SAVED_MODULE = "modules_to_save"
    ORIGINAL_MODULE = "original_module"
    BASE_LAYER = "base_layer"
    PLAIN = "plain"


WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FSDP and activation checkpointing put into the paths of the modules that they wrap."""

LORA_FACTOR = re.compile(r"\.lora_(embedding_)?A(?=\.|\Z)")
"""Where the module path ends in the name of a lora_A."""
_PARTS = {part.value: part for part in Part}
_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")
INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
"""A number inside a path: of a layer or an expert."""
LINEAR_FACTORS = frozenset({Part.LORA_A, Part.LORA_B})
_AROUND = re.compile(rf"(?:\.{Part.BASE_LAYER.value})+(?=\.(?!{Part.BASE_LAYER.value}(?:\.|\Z)))")
_WITH_LEAF = LINEAR_FACTORS | {Part.MAGNITUDE}
_PART = re.compile(
    r"^(?P<module>.*?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"|(?:token_adapter\.)?trainable_tokens_delta|modules_to_save|original_module)"
    r"(?:\.(?P<rest>[^.]+(?:\.[^.]+)*))?$",
    re.DOTALL,
)


class AdapterKey(Struct, frozen=True, kw_only=True):
    """One parsed tensor name. `module` is the module path inside the model, without PEFT's prefix.

    `leaf` is the parameter of the part ("weight", "bias") or, for `Part.PLAIN`, the parameter of the module itself;
    None where the part is a parameter by itself (``lora_embedding_A``). A ``lora_A`` that is one by itself, as prime-rl
    and loralib have it, is PEFT's ``lora_A.weight``. `adapter_name` is None where the name was
    taken out on saving. `text` is the name as it stands in the file; the parsed form is without the `WRAPPERS` in it.
    """

    text: str
    module: str
    part: Part
    leaf: str | None = None
    adapter_name: str | None = None
    prefixed: bool = True
    wrapper: str | None = None
    """The first of the `WRAPPERS` in the name."""

    @property
    def tensor(self) -> str:
        """The model's own name of a plain tensor: ``score.weight``."""
        return f"{self.module}.{self.leaf}" if self.module and self.leaf else self.module or self.leaf or ""

    @property
    def canonical(self) -> str:
        """The name that `save_pretrained` would give it: with the prefix, without the adapter name."""
        if self.part is Part.PLAIN:
            return PREFIX + self.tensor
        if self.part is Part.SAVED_MODULE:  # a module that was trained whole has its plain name
            return f"{PREFIX}{self.module}.{self.leaf}"
        if self.part in (Part.BASE_LAYER, Part.TOKENS_BASE):
            return f"{PREFIX}{self.module}.{self.part.value}.{self.leaf}"
        leaf = self.leaf if self.part is not Part.MAGNITUDE else None
        part = f"token_adapter.{self.part.value}" if self.part is Part.TOKENS_DELTA else self.part.value
        return ".".join(filter(None, (PREFIX + self.module, part, leaf)))


def parse(name: str) -> AdapterKey:
    """Return the parsed form of an adapter's tensor name. Every string parses; what is no LoRA part is PLAIN."""
    bare = unwrapped(name)
    prefixed = bare.startswith(PREFIX)
    wrapper = None if bare is name else next(part for part in name.split(".") if part in WRAPPERS)
    module, part, adapter_name, leaf = _split(bare.removeprefix(PREFIX))
    return AdapterKey(
        text=name,
        module=module,
        part=part,
        leaf=leaf,
        adapter_name=adapter_name,
        prefixed=prefixed,
        wrapper=wrapper,
    )


def parse_all(names: Iterable[str]) -> dict[str, AdapterKey]:
    """Return the parsed form of each name; of those that differ in their numbers alone only the first is taken apart."""
    forms: dict[str, tuple[AdapterKey, int, int] | None] = {}
    parsed: dict[str, AdapterKey] = {}
    for name in names:
        form = without_numbers(name)
        if form not in forms:
            first = parsed[name] = parse(name)
            start = len(PREFIX) if first.prefixed else 0
            after = name[start + len(first.module) :]
            alike = name.startswith(first.module, start) and not _NUMBER.search(after)
            forms[form] = (first, start, len(after)) if alike else None
            continue
        known = forms[form]
        if known is None:  # with wrappers in the path, or numbers behind it
            parsed[name] = parse(name)
            continue
        first, start, rest = known
        parsed[name] = AdapterKey(
            text=name,
            module=name[start : len(name) - rest],
            part=first.part,
            leaf=first.leaf,
            adapter_name=first.adapter_name,
            prefixed=first.prefixed,
        )
    return parsed


def _split(inner: str) -> tuple[str, Part, str | None, str | None]:
    """Split a name without PEFT's prefix into module path, part, adapter name and leaf."""
    match = _PART.match(inner)
    if match is not None:
        part = _PARTS[match["part"].rpartition(".")[2]]
        return match["module"], part, *_split_rest(part, match["rest"])
    module, _, leaf = inner.rpartition(".")
    for part in (Part.TOKENS_BASE, Part.BASE_LAYER):
        if module.endswith(f".{part.value}"):
            return module.removesuffix(f".{part.value}"), part, None, leaf
    return module, Part.PLAIN, None, leaf


def _split_rest(part: Part, rest: str | None) -> tuple[str | None, str | None]:
    """Split what follows the part into adapter name and leaf: ``default.weight``, ``weight``, ``default`` or none."""
    alone = "weight" if part in LINEAR_FACTORS else None
    if rest is None:
        return None, alone
    if part is Part.ORIGINAL_MODULE:
        return None, rest
    if part is Part.SAVED_MODULE:  # a saved module may be deep: modules_to_save.default.out_proj.weight
        adapter_name, _, leaf = rest.partition(".")
        return (adapter_name, leaf) if leaf else (None, adapter_name)
    head, _, leaf = rest.rpartition(".")
    if part in _WITH_LEAF and (head or leaf in ("weight", "bias")):
        return head or None, leaf
    return rest, alone


def unwrapped(name: str) -> str:
    """Return a tensor's name without the wrappers in it: ``layers.0._orig_mod.mlp.weight`` is ``layers.0.mlp.weight``."""
    parts = name.split(".")
    return name if WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)


def without_wrapped(module: str) -> str:
    """Return a module's path as the base has it, where PEFT wrapped a module around it: LoRA on its bare parameters.

    A wrapper that is itself wrapped, for a second parameter, keeps its name: nothing of the base is inside.
    """
    return _AROUND.sub("", module)


def has_lora_factor(name: str) -> bool:
    """Return whether it is the name of a lora_A, of a matrix or an embedding."""
    return LORA_FACTOR.search(name) is not None


def is_under(module: str, names: frozenset[str]) -> bool:
    """Return whether one of `names` equals `module` or is a dotted suffix of it, as PEFT matches list targets."""
    if not names:
        return False
    at = module.rfind(".")  # most names are a last component, so the ends are tried from the shortest
    while at != -1:
        if module[at + 1 :] in names:
            return True
        at = module.rfind(".", 0, at)
    return module in names


def split_layer(module: str) -> tuple[int | None, str]:
    """Return the number of a module path's layer and the path with its numbers as ``*``.

    ``model.layers.3.mlp.up_proj`` is (3, ``model.layers.*.mlp.up_proj``); the first number is the layer's.
    """
    first = _NUMBER.search(module)
    return (int(first[1]) if first else None), without_numbers(module)


def without_numbers(path: str) -> str:
    """Return a path with its numbers, those of layers and experts, as ``*``."""
    return _NUMBER.sub("*", path)

"""Reading the names of an adapter's tensors: which module of the model that PEFT wraps each of them means.

PEFT calls a tensor ``base_model.model.<module>.<part>``. Trainers save others: prime-rl leaves the prefix out, as vLLM
reads it; torch.compile, FSDP1 and activation checkpointing put wrappers into the path, DistributedDataParallel
``module.`` before it; the state dict of a `LoraModel` begins with only ``model.``; and a name may have lost what its
class calls its base model, too. Parts that are plainly not the model's are removed (`view.bare_path`); the rest is
decided by the modules of the base or, without one, by what transformers' classes call theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from lora_tool.adapters.targeting import is_of_base_model, trained_for
from lora_tool.adapters.view import LAYER_PARTS, AdapterView
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.models.ends import is_new_module
from lora_tool.models.model_tensors import ModuleNames, base_prefixes

LORA_MODEL = "model."
"""What the state dict of PEFT's `LoraModel` puts before the names of the model in it."""
PEFT_MODEL = "base_model."
"""What that of a `PeftModel` puts before them in turn."""
_TEXT, _TEXT_IN_MLX = "language_model.", "language_model.model."
"""The prefix of the layers of a multimodal model's text in transformers, and in MLX-LM."""
_BARE = "FEATURE_EXTRACTION"
"""The task type of an adapter for the base model's own class, without a head."""


class PathReading(Struct, frozen=True, kw_only=True):
    """How bare paths become those in the model: `strip` is taken off their beginning, `add` put before it."""

    strip: str = ""
    add: str = ""

    def path(self, bare: str) -> str:
        """Return the path in the model; nothing is put before heads and output layers."""
        rest = bare.removeprefix(self.strip)
        return rest if is_new_module(rest) else self.add + rest


AS_THEY_ARE = PathReading()


class Readings:
    """The possible meanings of the names in an adapter's file: of those with PEFT's prefix, or of those without.

    `model` are the modules of the adapter's base, None where they are not known.
    """

    def __init__(self, view: AdapterView, model: ModuleNames | None, *, prefixed: bool) -> None:
        count = 0
        lora: set[str] = set()
        heads: list[str] = []
        for key in view.adapter.keys.values():
            if key.prefixed is not prefixed:
                continue
            count, path = count + 1, view.paths[key.module]
            if is_new_module(path):
                heads.append(path)
            elif key.part in LAYER_PARTS:
                lora.add(path)
        self.paths = [path.replace(f".{Part.BASE_LAYER.value}", "") for path in sorted(lora)]
        """The modules of its LoRA as the base knows them, heads and output layers left out."""
        self.headed = True if heads else _headed(view.config)
        """Whether it was trained on a class with a head or an output layer; None where its config does not show it."""
        self._model = model
        self._prefixed = prefixed
        self._half = next((path for path in heads if path.startswith(PEFT_MODEL)), None)
        self._mixed = count < len(view.adapter.keys)

    def fitting(self) -> list[PathReading]:
        """Return the readings that make all `paths` modules of a class of the base model, as they are first."""
        model = self._model
        if model is None or not self.paths:
            return []
        prefix = f"{model.prefix}." if model.prefix else ""
        classes = [model.headed] * (self.headed is not False) + [model.bare] * (self.headed is not True)
        tried = [
            PathReading(strip=strip, add=add)
            for strip in dict.fromkeys(("", LORA_MODEL, PEFT_MODEL, prefix))
            for add in dict.fromkeys(("", prefix))
            if not strip or strip != add
        ]
        tried.append(PathReading(strip=_TEXT_IN_MLX, add=f"{prefix}{_TEXT}"))
        return [reading for reading in tried if any(self._fits(reading, held) for held in classes)]

    def _fits(self, reading: PathReading, held: frozenset[str]) -> bool:
        return all(path.startswith(reading.strip) and reading.path(path) in held for path in self.paths)

    def chosen(self, hint: str) -> PathReading:
        """Return the one reading of the names.

        Names with PEFT's prefix are read as they are where the base has these modules, else in the one other reading
        whose modules it has. Names that fit no reading stay as they are: LT501 says that the base has no such module.
        Raises `UnsupportedAdapter` with the `hint` where the names fit two readings.
        """
        if self._model is None and not self._prefixed:
            for text in self._doubts():
                raise UnsupportedAdapter(text, hint=hint)
        if not self.paths:
            return PathReading(strip=PEFT_MODEL) if self._half else AS_THEY_ARE
        found = self.fitting()
        if not found or (self._prefixed and AS_THEY_ARE in found):
            return AS_THEY_ARE
        if len(found) > 1:
            listed = " or ".join(f"`{reading.path(self.paths[0])}`" for reading in found)
            raise UnsupportedAdapter(
                f"`{self.paths[0]}` is ambiguous: it can mean the base model's {listed}", hint=hint
            )
        return found[0]

    def _doubts(self) -> Iterator[str]:
        """Yield what names without PEFT's prefix may mean besides, with no base model to look into.

        A class with a head has its layers below a name of its own, ``model.layers``; the base model's class has not.
        """
        if self._half is not None and self._mixed:
            yield f"`{self._half}` has half of PEFT's prefix, so the other names may have lost a part of their path too"
        known = base_prefixes()
        for path in self.paths:
            first, _, rest = path.partition(".")
            if self.headed is None:
                yield f"`{path}` may belong to a model with a head or to its base model: the config does not name the class"
            elif f"{first}." == LORA_MODEL and rest.partition(".")[0] in known:
                yield f"`{path}` is ambiguous: it is the path in the model, or PEFT's own `{first}.` followed by `{rest}`"
            elif self.headed and first not in known:
                yield f"`{path}` does not begin like the modules of a model with a head, and the modules of the base model are not known"
            elif not self.headed and first in known:
                yield f"`{path}` is ambiguous: it is the path in the model with a head, or `{rest}` in its base model"


def _headed(config: AdapterConfig) -> bool | None:
    trained = trained_for(config) or config.trained_class
    return None if trained is None else trained != _BARE and not is_of_base_model(trained)

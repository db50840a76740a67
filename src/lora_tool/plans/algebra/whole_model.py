"""An adapter of a multimodal model's text class, under the names that its modules have in the whole model.

`AutoModelForCausalLM` builds a text model of such a checkpoint, with `model.layers`; a server loads all of it, and has
the same modules as `model.language_model.layers`, say. So one beginning of their paths stands for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.core import keys
from lora_tool.models.heads import head_of
from lora_tool.models.text_classes import text_class_of
from lora_tool.plans.core.steps import Step


class Beginnings(Struct, frozen=True, kw_only=True):
    """What module paths begin with in the text class, and in the whole model; nothing where both are the same."""

    text: str = ""
    whole: str = ""

    def path(self, module: str) -> str:
        """Return a module's path in the whole model; a new head has the same in both."""
        if self.text == self.whole or head_of(module) or not module.startswith(self.text):
            return module
        return self.whole + module.removeprefix(self.text)

    def back(self, path: str) -> str:
        """Return a path of the whole model as the text class has it; so also the name of a tensor."""
        return self.text + path.removeprefix(self.whole) if path.startswith(self.whole) else path

    def steps(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        """Return the steps that write an adapter's tensors, with the whole model's paths in the tensors' names."""
        if self.text == self.whole:
            return tuple(steps)
        return tuple(replace(step, out=replace(step.out, name=self._name(step.out.name))) for step in steps)

    def base(self, base: ModelDir) -> ModelDir:
        """Return the whole model with the names that its tensors have in the text class, for those that are in it."""
        if self.text == self.whole:
            return base
        tensors = {self.back(name): tensor for name, tensor in base.tensors.items()}
        return replace(base, weights=replace(base.weights, tensors=tensors))

    def _name(self, name: str) -> str:
        key = keys.parse(name)
        return replace(key, module=self.path(key.module)).canonical

    def as_json(self) -> dict[str, str]:
        """Return it as JSON data, for the manifest."""
        return {"text": self.text, "whole": self.whole}

    @classmethod
    def of_json(cls, data: object) -> Beginnings:
        """Return what a manifest has; that of no renaming where it has none."""
        known: dict[str, Any] = data if isinstance(data, dict) else {}
        return cls(text=str(known.get("text", "")), whole=str(known.get("whole", "")))


SAME = Beginnings()


def beginnings_of(view: AdapterView, base: ModelDir | None) -> Beginnings:
    """Return how module paths begin in the text class that the adapter was trained on, and in `base`; see `text_class_of`."""
    if base is None or base.config is None:
        return SAME
    modules = (layer.target for layer in view.layers)
    text = text_class_of(base.config.model_type or "", base.tensors, modules)
    return SAME if text is None else Beginnings(text=text.strip, whole=text.add)

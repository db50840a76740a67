"""What a server takes depends on its class for the base: LoRA at all, on the ends, on experts in one tensor or in many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from lora_tool.checkpoints import ModelDir


class ModelClasses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The classes that a server knows, by the names that `architectures` of config.json has."""

    plain: frozenset[str]
    """Those that take LoRA on the linear layers."""
    without: frozenset[str]
    """Those that take none."""
    ends: Mapping[str, frozenset[str]]
    """Embedding or output layer, by the last part of its name → the classes that take LoRA on it."""
    ends_unknown: frozenset[str]
    """Those of which that depends on a class inside."""
    stacks: frozenset[str]
    """Those that read LoRA on fused experts as PEFT packs it, and on experts one by one not; others the reverse."""
    endings: tuple[str, ...]
    """The ends of names that are replaced by one another where a name is not known: a classifier's by a language model's."""

    def of(self, base: ModelDir | None) -> str | None:
        """Return the name of the base's class if the server takes LoRA for it; None if not, or if it is not known."""
        name = self._known(base)
        return name if name in self.plain else None

    def without_lora(self, base: ModelDir | None) -> str | None:
        """Return the name of the base's class if the server takes no LoRA for it."""
        name = self._known(base)
        return name if name in self.without else None

    def _known(self, base: ModelDir | None) -> str | None:
        config = None if base is None else base.config
        if config is None or not config.architectures:
            return None
        return next((name for name in self._names(config.architectures[0]) if name in self.plain | self.without), None)

    def _names(self, name: str) -> Iterator[str]:
        """Yield the names by which the server looks for a class."""
        yield name
        ending = next(filter(name.endswith, self.endings), None)
        if ending is not None:
            yield from (f"{name.removesuffix(ending)}{other}" for other in self.endings)

    def takes_end(self, base: ModelDir | None, module: str) -> bool | None:
        """Return whether the base's class takes LoRA on an embedding or output layer; None if that is not known."""
        name = self.of(base)
        if name is None or name in self.ends_unknown:
            return None
        return name in self.ends.get(module.rpartition(".")[2], ())

    def takes_stacks(self, base: ModelDir | None) -> bool | None:
        """Return whether the base's class reads LoRA on fused experts as PEFT packs it; None if it is not known."""
        name = self.of(base)
        return None if name is None else name in self.stacks

"""A base model under the names of an adapter's modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.checkpoints import ModelDir
from lora_tool.core.tensors import StoredTensor
from lora_tool.models import Architecture

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts


class BaseMatch(Struct, frozen=True, kw_only=True, eq=False):
    """A base model whose tensor names mean the adapter's modules: `strip` taken off a module path, `add` put before."""

    base: ModelDir
    """As on disk; in the names of memory, with every parameter of its class, where there are `facts`."""
    arch: Architecture
    strip: str = ""
    add: str = ""
    facts: ModelFacts | None = None
    """What transformers says of the class of the merged model, where a merge asked it."""
    missing: frozenset[str] = frozenset()
    """Parameters of that class that the base on disk has nothing for."""
    in_part: bool = False
    """Whether a module that it does not name may be there all the same, under another name."""
    outside: frozenset[str] = frozenset()
    """What the class that the adapter was trained on does not have: beside a text model the vision of the whole one."""

    def name(self, module: str) -> str:
        """Return the module path as the base's files have it."""
        if self.strip and self.add and not module.startswith(self.strip):
            return module  # the output layer: only the text model next to it lies deeper on disk
        return self.add + module.removeprefix(self.strip)

    def tensor(self, module: str, leaf: str = "weight") -> StoredTensor | None:
        """Return the base's tensor of the module, None where there is none."""
        return self.base.tensors.get(f"{self.name(module)}.{leaf}")

    def trained(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the tensors of the class that the adapter was trained on, by the names that it has there."""
        for name, tensor in self.base.tensors.items():
            if name not in self.outside:
                moved = name.startswith(self.add)
                yield (self.strip + name.removeprefix(self.add) if moved else name), tensor

    def held(self, name: str) -> StoredTensor | None:
        """Return the tensor of that name if the base on disk has it, or the tensors that it is made of."""
        return None if name in self.missing else self.base.tensors.get(name)

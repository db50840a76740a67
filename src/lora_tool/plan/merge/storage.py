"""What becomes of the quantised weights of a base: they stay as they are, or the whole model becomes a plain one.

A plan is made on the matrices that they stand for. Where the adapters change none of them, every tensor of the base
that is not changed is copied as it is stored, and the config with it. Where they change one, all are dequantised:
W + ΔW lies between the numbers that a quantised weight can be, and rounding back to those takes ΔW away.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lora_tool.actions import NEW, TensorAction
from lora_tool.checkpoint import ModelDir
from lora_tool.choices import Choice
from lora_tool.display import counted, size
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.quantised.encodings import Encoding, encoding_of, parts
from lora_tool.plan.core.ops import Copy
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.tensors import StoredTensor


@enum.unique
class Storage(Choice):
    """How the weights of a quantised base are stored in the merged model."""

    ALL_16BIT = "all-16bit"
    """Every weight as the matrix that it stands for, in the type of the model; nothing is quantised."""
    AS_BASE = "as-base"
    """Quantised weights byte for byte; only for adapters that change none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedBase:
    """A base with quantised weights: as it is stored, and with the matrices that they stand for."""

    stored: ModelDir
    plain: ModelDir

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Name of each quantised weight → how it is stored."""
        found = ((name, encoding_of(tensor)) for name, tensor in self.plain.tensors.items())
        return {name: encoding for name, encoding in found if encoding is not None}

    @property
    def formats(self) -> str:
        """What the formats of its weights are called."""
        return ", ".join(dict.fromkeys(map(str, self.encodings.values())))

    def settle(self, steps: Sequence[Step], asked: Storage | None, *, cast: bool) -> Storage:
        """Return how the output is stored: as `asked`, else as the base where `steps` change no quantised weight.

        `cast` says that all weights are to have another type than the base's. Raises `UnsupportedAdapter` for a storage
        in which the changes would be lost.
        """
        touched = self._touched(steps)
        if asked is Storage.AS_BASE and touched:
            raise UnsupportedAdapter(
                f"{self.stored.root}: the adapter changes {counted(len(touched), 'quantised weight')}, the first is "
                f"`{touched[0].out.name}` ({self._format(touched[0])}): rounded back to that format it would lose most of "
                "what was trained",
                hint=f'`store="{Storage.ALL_16BIT}"` merges exactly, and writes plain weights',
            )
        if asked is Storage.AS_BASE and cast:
            raise UnsupportedAdapter(
                f"{self.stored.root}: quantised weights that stay as they are keep their type",
                hint=f'`store="{Storage.ALL_16BIT}"` with a dtype, or no dtype',
            )
        return asked or (Storage.ALL_16BIT if touched or cast else Storage.AS_BASE)

    def _touched(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that change a quantised weight, or compute with one."""
        quantised = self.encodings
        return [
            step
            for step in steps
            if step.action in NEW
            and (step.out.name in quantised or any(encoding_of(tensor) is not None for tensor in step.op.inputs))
        ]

    def _format(self, step: Step) -> str:
        found = (encoding_of(tensor) for tensor in step.op.inputs)
        return str(next(filter(None, found), self.encodings.get(step.out.name)))

    def as_stored(self, steps: Sequence[Step], dropped: Collection[str]) -> tuple[Step, ...]:
        """Return the steps with every tensor copied as it is stored that they do not change, but for those `dropped`.

        Raises `UnsupportedAdapter` where a changed tensor has another name on disk.
        """
        changed = {step.out.name: step for step in steps if step.action in NEW}
        kept = {name: tensor for name, tensor in self.stored.tensors.items() if name not in dropped}
        found = tuple(changed.get(name) or _copy(tensor) for name, tensor in kept.items())
        others = [step for name, step in changed.items() if name not in kept]
        renamed = [step for step in others if step.action is TensorAction.MERGED]
        if renamed:
            raise UnsupportedAdapter(
                f"{self.stored.root}: `{renamed[0].out.name}` has another name in the base, and the names of its quantised "
                "weights stay as they are",
                hint=f'`store="{Storage.ALL_16BIT}"` writes all under their new names',
            )
        return (*found, *others)

    def left_behind(self) -> Iterator[InputRecord]:
        """Yield the tensors on disk that a plain model does not have: parts of weights, and what was calibrated."""
        of = {part.name: name for name, encoding in self.encodings.items() for part in parts(encoding)}
        for name, tensor in self.stored.tensors.items():
            if name in of and of[name] != name:
                yield InputRecord(
                    path=tensor.path, name=name, action=TensorAction.CONSUMED, reason=f"a part of {of[name]}"
                )
            elif name not in self.plain.tensors:
                reason = "measured on the quantised model, and of no use to a plain one"
                yield InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)

    def notes(self, storage: Storage, steps: Sequence[Step]) -> Iterator[str]:
        """Yield what the plan says of the quantised weights."""
        what = f"{counted(len(self.encodings), 'quantised weight')} ({self.formats})"
        if storage is Storage.AS_BASE:
            yield f"{what}: the adapter changes none of them, they stay byte for byte as in the base"
        else:
            before, after = size(self.stored.weights.nbytes), size(sum(step.out.nbytes for step in steps))
            yield f"{what}: dequantised and merged as plain weights, {before} in the base, {after} merged"


def _copy(tensor: StoredTensor) -> Step:
    return Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="as in the base")

"""Which weights of a quantised base stay quantised in the merged model.

A plan is made on the matrices that they stand for. Where the adapters change none of them, every tensor of the base
that is not changed is copied as it is stored, and the config with it. Where they change one, all are dequantised: W +
ΔW lies between the numbers that a quantised weight can be. Rounding back to those takes part of ΔW away, of four bits
nearly all of it: it is done only on request, and the rest is measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import metadata_in_files
from lora_tool.core.display import counted, size
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import NEW, StoredTensor, TensorAction
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.encodings import Bnb4, BnbInt8, Encoding, encoding_of, parts
from lora_tool.formats.quantised.layouts import is_of_cache, measured_for
from lora_tool.formats.quantised.torchao import is_told, metadata_of
from lora_tool.models import architecture_of
from lora_tool.models.layers import EXPERTS, together
from lora_tool.plans.core.ops import Copy, Precision
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import InputRecord, Step
from lora_tool.plans.merge.draft import Draft
from lora_tool.plans.merge.passes.steps import dropped_from_base
from lora_tool.plans.merge.quantised.requantised import coded_steps, kept_line, kept_share, require_kept
from lora_tool.plans.merge.quantised.skip_lists import with_plain_modules
from lora_tool.plans.merge.storages import Storage

_NOT_IN_TRANSFORMERS = (
    "transformers cannot load the merged model: it takes all experts of a packed model of compressed-tensors for packed "
    "ones; the storage all-16bit writes what it loads"
)


def in_storage(draft: Draft, storage: Storage | None, *, allow_loss: bool) -> Draft:
    """Return the draft with the weights of its base in this storage; None takes the one that keeps everything.

    Raises `UnsupportedAdapter` where the storage cannot have the changes, or `Precision.PEFT` the storage.
    """
    inputs = draft.inputs
    unplaced = draft.model.leftovers
    dropped = tuple(dropped_from_base(draft))
    unplaced_of_classifier = () if draft.head is None else unplaced
    base = _QuantisedBase(stored=inputs.stored, plain=inputs.base, parameter_of=draft.model.parameter_of)
    stored = base.settle(
        draft.steps,
        storage,
        {item.name for item in (*dropped, *unplaced_of_classifier)},
        cast=draft.dtype not in (None, inputs.base.dtype) or inputs.is_text_only,
        allow_loss=allow_loss,
    )
    if draft.precision is Precision.PEFT and any(isinstance(step.op, Requantise) for step in stored.steps):
        raise UnsupportedAdapter(
            '`store="as-base"`: PEFT can round merged weights only to formats of bitsandbytes, and damages them',
            hint='`precision="float32"` writes them, and `store="all-16bit"` merges as PEFT does',
        )
    # a buffer that the class computes stays where weights stay as they are stored
    left = unplaced if stored.storage is Storage.ALL_16BIT else unplaced_of_classifier
    kept = {"requantised": stored.kept} if stored.kept else {}
    return replace(
        draft,
        base=replace(draft.base, config=stored.config),
        steps=stored.steps,
        leftovers=(*dropped, *left, *stored.leftovers),
        notes=(*draft.notes, stored.note),
        warnings=(*draft.warnings, *stored.warnings),
        metadata=base.metadata(stored.steps),
        recorded={**draft.recorded, "store": stored.storage.value, **kept},
    )


class _Stored(Struct, frozen=True, kw_only=True):
    """The output of a merge for a quantised base and its changes."""

    storage: Storage
    steps: tuple[Step, ...]
    leftovers: tuple[InputRecord, ...]
    """Tensors on disk that are not written."""
    config: ModelConfig
    note: str
    """The plan's note on it."""
    warnings: tuple[str, ...] = ()
    kept: Mapping[str, Any] | None = None
    """How much of ΔW is left where merged weights were rounded to their format again."""


class _QuantisedBase(Struct, frozen=True, kw_only=True, dict=True):
    """A base with quantised weights: as it is stored, and with the matrices that they stand for."""

    stored: ModelDir
    plain: ModelDir
    parameter_of: Callable[[str], str]
    """Tensor on disk → the parameter in memory that it is, or is a part of."""

    @cached_property
    def encodings(self) -> dict[str, Encoding]:
        """Name of each quantised weight → how it is stored."""
        found = ((name, encoding_of(tensor)) for name, tensor in self.plain.tensors.items())
        return {name: encoding for name, encoding in found if encoding is not None}

    def settle(
        self,
        steps: Sequence[Step],
        wanted: Storage | None,
        dropped: Collection[str],
        *,
        cast: bool,
        allow_loss: bool,
    ) -> _Stored:
        """Return the output: stored as `wanted`, else as the base where `steps` change no quantised weight, else plain.

        `cast` says that all weights are to have another type than the base's, `dropped` are tensors of the base that
        the output is to be without. Raises `UnsupportedAdapter` for a storage in which the changes would be lost,
        unless that is to be allowed.
        """
        touched = self._touched(steps)
        dropped = set(dropped) - {
            step.out.name for step in steps
        }  # the copy of an end that is tied no longer is written
        if wanted in (Storage.AS_BASE, Storage.TOUCHED_16BIT) and cast:
            raise UnsupportedAdapter(
                f"{self.stored.root}: weights that stay quantised keep their dtype and their names",
                hint=f'`store="{Storage.ALL_16BIT}"` writes another dtype, or only the text model',
            )
        storage = wanted or (Storage.ALL_16BIT if touched or cast else Storage.AS_BASE)
        if touched or storage is Storage.ALL_16BIT:
            self._require_not_transposed()
        if storage is Storage.ALL_16BIT:
            names = frozenset(self.encodings)
            return _Stored(
                storage=storage,
                steps=tuple(steps),
                leftovers=tuple(self._left_behind(names)),
                config=self.plain.whole_config,
                note=self._note(f"{self._what(names)} dequantised and merged in 16 bits", steps),
            )
        if storage is Storage.AS_BASE and touched:
            return self._requantised(steps, dropped, touched, allow_loss=allow_loss)
        return self._mostly_as_stored(steps, storage, dropped, frozenset(step.out.name for step in touched))

    def metadata(self, steps: Sequence[Step]) -> Mapping[str, str] | None:
        """Return the metadata of the files where loaders tell quantised weights by it; None where they need none."""
        said, of = metadata_in_files(self.stored), self._weights_of_parts
        written = {step.out.name for step in steps}
        by_metadata = {name for name, each in self.encodings.items() if is_told(each) and each.codes.name in written}
        if not by_metadata:
            return None
        names = dict.fromkeys(
            of[name] if of.get(name) in by_metadata else name for name in (step.out.name for step in steps)
        )
        return metadata_of(said, names, by_metadata)

    def _requantised(
        self, steps: Sequence[Step], dropped: Collection[str], touched: Sequence[Step], *, allow_loss: bool
    ) -> _Stored:
        """Return the output where the changed weights are rounded to their format again."""
        changed = {step.out.name: step for step in touched}
        new = [name for name in changed if name not in self.encodings]
        self._require_own_names(new)
        if new:
            raise UnsupportedAdapter(
                f"{self.stored.root}: `{new[0]}` is made of a quantised weight, and the base has no weight of that name to "
                "be stored as",
                hint=f'`store="{Storage.TOUCHED_16BIT}"` writes it in 16 bits',
            )
        made = (coded_steps(step, self.encodings[name]) for name, step in changed.items())
        by_name = {step.out.name: step for both in made for step in both}
        left = tuple(self._dropped_parts(dropped))
        others = [step for step in steps if step.out.name not in changed]
        stored = self._as_stored(others, {*dropped, *(item.name for item in left)}, frozenset())
        found = tuple(by_name.get(step.out.name, step) for step in stored)
        kept = kept_share(found)
        what = f"{self._what(changed)} merged and rounded to their format again"
        require_kept(kept, f"{self.stored.root}: {what}", allow_loss=allow_loss)
        return _Stored(
            storage=Storage.AS_BASE,
            steps=found,
            leftovers=left,
            config=self.stored.whole_config,
            note=f"{what}{kept_line(kept)}; {counted(len(self.encodings) - len(changed), 'other')} as in the base"
            + self._measured_before(changed),
            kept=kept,
        )

    def _measured_before(self, changed: Collection[str]) -> str:
        """Return the end of a sentence about scales that were measured for the changed weights before the merge."""
        of, modules = self._weights_of_parts, {name.removesuffix(".weight") for name in changed}
        names = [
            name
            for name in self.stored.tensors
            if name not in self.plain.tensors and name not in of and measured_for(name) in modules
        ]
        what = counted(len(names), "scale")
        return f"; {what} of inputs, the first {names[0]}, as measured before the merge" if names else ""

    def _mostly_as_stored(
        self, steps: Sequence[Step], storage: Storage, dropped: Collection[str], touched: frozenset[str]
    ) -> _Stored:
        """Return the output where quantised weights stay, but for those that are fused with one that changes."""
        freed = together(touched, self.encodings) if touched else frozenset()
        left = (*self._left_behind(freed), *self._dropped_parts(dropped))
        found = self._as_stored(steps, {*dropped, *(item.name for item in left)}, freed)
        note = f"{self._what(self.encodings.keys() - freed)} as in the base, byte for byte: the adapter changes none of them"
        config = self.stored.whole_config
        warnings: tuple[str, ...] = ()
        if freed:
            some_stay = bool(self.encodings.keys() - freed)
            config = (
                with_plain_modules(self.stored, self.plain, freed, self.parameter_of)
                if some_stay
                else self.plain.whole_config
            )
            fused = (
                f", {len(freed - touched)} of them fused with one that the adapter changes" if freed - touched else ""
            )
            stay = f"; {counted(len(self.encodings) - len(freed), 'other')} as in the base" if some_stay else ""
            note = self._note(f"{self._what(freed)} dequantised{fused}{stay}", found)
            if some_stay and any(EXPERTS.match(name) and self._is_packed(name) for name in freed):
                warnings = (_NOT_IN_TRANSFORMERS,)
        return _Stored(storage=storage, steps=found, leftovers=left, config=config, note=note, warnings=warnings)

    def _is_packed(self, name: str) -> bool:
        """Return whether a weight is packed as compressed-tensors packs it."""
        return any(part.name.endswith(".weight_packed") for part in parts(self.encodings[name]))

    def _require_not_transposed(self) -> None:
        """Return if weights mean the matrices that the class has. Raises `UnsupportedAdapter`."""
        arch = architecture_of(self.stored.whole_config.model_type or "")
        if (
            arch is not None
            and arch.conv1d
            and any(isinstance(each, Bnb4 | BnbInt8) for each in self.encodings.values())
        ):
            raise UnsupportedAdapter(
                f"{self.stored.root}: {arch.model_type} stores linear layers transposed, and bitsandbytes transposes them before "
                "quantising, which lora-tool does not support",
                hint="merge into the 16-bit model that it was made from: `base=MODEL`",
            )

    def _touched(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that change a quantised weight, or compute with one."""
        quantised = self.encodings
        return [
            step
            for step in steps
            if step.action in NEW
            and (step.out.name in quantised or any(encoding_of(tensor) is not None for tensor in step.op.inputs))
        ]

    def _as_stored(self, steps: Sequence[Step], dropped: AbstractSet[str], freed: AbstractSet[str]) -> tuple[Step, ...]:
        """Return the steps with every tensor copied as it is stored that they do not change, but for those `dropped`.

        The weights `freed` are written by their steps. Raises `UnsupportedAdapter` where a changed tensor has another
        name on disk.
        """
        wanted = {step.out.name: step for step in steps if step.action in NEW or step.out.name in freed}
        of = self._weights_of_parts
        found: dict[str, Step] = {}
        for name, tensor in self.stored.tensors.items():
            weight = of.get(name, name)
            if weight in wanted:
                found.setdefault(weight, wanted[weight])
            elif dropped.isdisjoint({name, weight}):
                found[name] = _copy(tensor)
        others = [step for name, step in wanted.items() if name not in found]
        self._require_own_names([*(step.out.name for step in others), *sorted(freed - wanted.keys())])
        return (*found.values(), *others)

    def _require_own_names(self, names: Sequence[str]) -> None:
        """Return if no tensor of the base is another of these, which it lacks. Raises `UnsupportedAdapter`."""
        parameters = {self.parameter_of(name) for name in self.plain.tensors} if names else frozenset()
        renamed = [name for name in names if self.parameter_of(name) in parameters]
        if renamed:
            raise UnsupportedAdapter(
                f"{self.stored.root}: `{renamed[0]}` has another name on disk than transformers writes, but "
                "weights that stay quantised keep their names",
                hint=f'`store="{Storage.ALL_16BIT}"` writes all weights under their new names',
            )

    @cached_property
    def _weights_of_parts(self) -> dict[str, str]:
        """Return tensor on disk → the quantised weight that it is a part of."""
        return {part.name: name for name, encoding in self.encodings.items() for part in parts(encoding)}

    def _left_behind(self, freed: Collection[str]) -> Iterator[InputRecord]:
        """Yield the tensors on disk that are not written for the weights `freed`: their parts and calibration."""
        of = self._weights_of_parts
        modules = {name.removesuffix(".weight") for name in freed}
        for name, tensor in self.stored.tensors.items():
            if of.get(name) in freed and of[name] != name:
                yield InputRecord(
                    path=tensor.path, name=name, action=TensorAction.CONSUMED, reason=f"a part of {of[name]}"
                )
            elif name not in self.plain.tensors and name not in of and freed:
                everywhere = self.encodings.keys() <= set(freed)
                if everywhere or (measured_for(name) in modules and not is_of_cache(name)):
                    reason = "measured on the quantised weight, and useless for a dequantised one"
                    yield InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)

    def _dropped_parts(self, dropped: Collection[str]) -> Iterator[InputRecord]:
        """Yield the tensors on disk that are parts of weights which the output is without, or were measured for them."""
        of, modules = self._weights_of_parts, {name.removesuffix(".weight"): name for name in dropped}
        for name, tensor in self.stored.tensors.items():
            measured = name not in self.plain.tensors and name not in of and not is_of_cache(name)
            weight = modules.get(measured_for(name)) if measured else of.get(name)
            if weight in dropped and weight != name:
                what = "measured on" if measured else "a part of"
                reason = f"{what} {weight}, which is left out"
                yield InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)

    def _what(self, names: Collection[str]) -> str:
        formats = dict.fromkeys(str(encoding) for name, encoding in self.encodings.items() if name in names)
        return f"{counted(len(names), 'quantised weight')} ({', '.join(formats)})"

    def _note(self, what: str, steps: Sequence[Step]) -> str:
        """Return a line of the plan with the sizes before and after."""
        after = sum(step.out.nbytes for step in steps)
        return f"{what}, {size(self.stored.weights.nbytes)} in the base, {size(after)} merged"


def _copy(tensor: StoredTensor) -> Step:
    return Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="as in the base")

"""The plan of a merge, once its steps are known: weight files, side files, and what the manifest says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.actions import TensorAction
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.display import counted
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.plan.base.module_files import module_files
from lora_tool.plan.base.side_files import (
    another_dtype,
    classifier_changes,
    code_named,
    config_file,
    copied_files,
    dtype_changes,
    joined_changes,
    label_changes,
    left_out,
    other_tokenizers,
    owners,
    pad_token,
    trained_beside,
    vocabulary_changes,
)
from lora_tool.plan.base.task import CLASSIFIERS, GENERATING_CLASSES, Task
from lora_tool.plan.base.turn_ends import Generation, generation_of
from lora_tool.plan.core import sharding
from lora_tool.plan.core.manifest import adapter_name, describe_input
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import InputRecord, SideFile, Step
from lora_tool.plan.merge.context import MergeContext
from lora_tool.tensors import FileStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOrigin:
    """Hub id and commit of an input, for the manifest; both None for a local folder."""

    hub_id: str | None = None
    revision: str | None = None


LOCAL = HubOrigin()


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeInputs:
    """Base and adapters as they are on disk, each with its origin."""

    base: ModelDir
    adapters: tuple[AdapterDir, ...]
    base_origin: HubOrigin = LOCAL
    adapter_origin: HubOrigin | Sequence[HubOrigin] = LOCAL
    """One for all, or one per adapter."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of each adapter's weights, by which a merged model knows it again."""
        return tuple(fingerprint(each.weights) for each in self.adapters)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What the manifest calls each adapter."""
        return tuple(adapter_name(number) for number, _ in enumerate(self.adapters, start=1))

    def described(self, fingerprints: Sequence[str]) -> dict[str, Any]:
        """Return the manifest's entry of each input; `fingerprints` are the adapters'."""
        origins = self.adapter_origin
        origins = (origins,) * len(self.adapters) if isinstance(origins, HubOrigin) else tuple(origins)
        adapters = zip(self.adapter_names, self.adapters, origins, fingerprints, strict=True)
        return {
            "base": self._entry(self.base, self.base_origin, fingerprint(self.base.weights)),
            **{name: self._entry(each, origin, print_) for name, each, origin, print_ in adapters},
        }

    @staticmethod
    def _entry(each: ModelDir | AdapterDir, origin: HubOrigin, print_: str) -> dict[str, Any]:
        return describe_input(each.root, each.weights, hub_id=origin.hub_id, revision=origin.revision, print_=print_)


def build_plan(
    merge: MergeContext,
    steps: Sequence[Step],
    leftovers: Sequence[InputRecord],
    inputs: MergeInputs,
    *,
    precision: Precision,
    max_shard_bytes: int | None,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan of these steps: shards of at most `max_shard_bytes`, else the base's own; side files; manifest.

    `options` go into the manifest.
    """
    base, fingerprints = inputs.base, inputs.fingerprints
    homes = sharding.homes(steps, base.tensors)
    shards = sharding.lay_out(steps, homes=homes, max_shard_bytes=max_shard_bytes)
    side_files, notes, warnings = _side_files(merge)
    if len(shards) > 1:
        index = SideFile(
            filename=sharding.INDEX, content=sharding.index_json(shards), reason="written for the new weights"
        )
        side_files = (*side_files, index)
    earlier = base.manifest.merged_adapters if base.manifest else ()
    return Plan(
        shards=shards,
        side_files=side_files,
        leftovers=tuple(leftovers),
        inputs=_stamps(merge, side_files),
        precision=precision,
        warnings=warnings,
        notes=(_task_note(merge), *_left_out_notes(leftovers, base), *notes),
        input_names=_input_names(inputs),
        hashed=tuple(file.path for each in inputs.adapters for file in each.weights.files),
        manifest={
            "operation": "merge",
            "task": (Task.SEQ_CLS if merge.task in CLASSIFIERS else merge.task).value,
            "num_labels": merge.labels,
            "dtype": merge.dtype.value if merge.dtype else "as in the base",
            **options,
            "merged_adapters": [*earlier, *fingerprints],
            "inputs": inputs.described(fingerprints),
        },
    )


def _input_names(inputs: MergeInputs) -> dict[Path, str]:
    """Return folder → name in the manifest where there are several adapters; tensors of one need no telling apart."""
    if len(inputs.adapters) == 1:
        return {}
    roots = (each.root for each in inputs.adapters)
    return {inputs.base.root: "base", **dict(zip(roots, inputs.adapter_names, strict=True))}


def _side_files(merge: MergeContext) -> tuple[tuple[SideFile, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files beside the weights, notes for the report, and warnings."""
    changes: dict[str, object] = dict(dtype_changes(merge.base, merge.dtype))
    if merge.facts is not None:
        changes["architectures"] = [merge.facts.class_name]
    if merge.ends.untied:
        changes["tie_word_embeddings"] = False
    if merge.head is None and merge.labels is not None:
        changes |= label_changes(merge.base, merge.labels)
    adapters = [part.adapter for part in merge.adapted]
    generation = generation_of(adapters, merge.base) if _generates(merge) else Generation()
    vocabulary = merge.ends.vocabulary
    changes = joined_changes(
        changes, vocabulary_changes(merge.base, vocabulary.size) if vocabulary else {}, generation.config
    )
    warnings = [] if merge.dtype else list(another_dtype(merge.base))
    warnings += [
        f"`{name}` was tied to `{of}` and no longer is. Like PEFT, the merge does not write it, so transformers "
        "re-initialises it at every load; --untie writes it"
        for name, of in merge.ends.untied_unsaved.items()
    ]
    if merge.head is not None:
        pad = pad_token(adapters, merge.base)
        pad_id = pad.id if pad else merge.base.config.pad_token_id if merge.base.config else None
        if pad_id is None:
            warnings.append(
                "no pad_token_id: neither tokenizer nor base config names a pad token, so the merged model can only "
                "score one text at a time; set pad_token in tokenizer_config.json and merge again"
            )
        class_name = merge.arch.sequence_classification or ""
        changes |= classifier_changes(merge.base, class_name, merge.head.num_labels, pad_id)
    modules = module_files(owners(adapters, merge.base), merge.task)
    files = (
        config_file(merge.base, changes),
        *copied_files(adapters, merge.base, generation=merge.head is None and generation.file is None),
        *([generation.file] if generation.file else []),
        *modules.files,
    )
    warnings += [*trained_beside(adapters), *other_tokenizers(adapters), *modules.warnings, *code_named(files)]
    left = left_out(merge.base, {file.filename for file in files})
    return files, (*generation.notes, *left, *modules.notes), tuple(warnings)


def _generates(merge: MergeContext) -> bool:
    """Whether the merged model writes text: a causal LM, or another class that does."""
    name = merge.facts.class_name if merge.facts else ""
    return merge.task is Task.CAUSAL_LM or name.endswith(GENERATING_CLASSES)


def _left_out_notes(leftovers: Sequence[InputRecord], base: ModelDir) -> Iterator[str]:
    """Yield a line for each reason why tensors of the base are not in the output."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for item in leftovers:
        if (
            item.action is TensorAction.DROPPED
            and item.name in base.tensors
            and item.path == base.tensors[item.name].path
        ):
            by_reason[item.reason].append(item.name)
    for reason, names in by_reason.items():
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"left out of the base: {names[0]}{others}: {reason}"


def _task_note(merge: MergeContext) -> str:
    sources = " + ".join(str(part.adapter.root) for part in merge.adapted)
    labels = "" if merge.labels is None else counted(merge.labels, "label")
    if merge.head is None:
        model = f"{merge.arch.causal_lm}, {labels}" if merge.labels is not None else merge.arch.causal_lm
        return f"merging {sources} into {merge.base.root} as {model}"
    head = f"head from {merge.head.weight.path.parent}"
    return f"merging {sources} into {merge.base.root} as {merge.arch.sequence_classification}, {labels}, {head}"


def _stamps(merge: MergeContext, side_files: tuple[SideFile, ...]) -> tuple[FileStamp, ...]:
    weights = (merge.base.weights, *(part.adapter.weights for part in merge.adapted))
    stamps: Mapping[str, FileStamp] = {str(stamp.path): stamp for each in weights for stamp in each.stamps}
    extra = {str(file.source): FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **extra}.values())

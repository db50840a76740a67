"""The plan of a merge, once its steps are known: weight files, side files, and what the manifest says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lora_tool.actions import TensorAction
from lora_tool.architectures.heads import LANGUAGE_MODELS
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.display import counted, from_here
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
    not_merged_beside,
    other_tokenizers,
    owners,
    pad_token,
    quantisation_file,
    vocabulary_changes,
)
from lora_tool.plan.base.task import CLASSIFIERS, Task
from lora_tool.plan.base.turn_ends import Generation, generation_of
from lora_tool.plan.core import sharding
from lora_tool.plan.core.manifest import adapters_in, describe_input, input_name
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import InputRecord, SideFile, Step
from lora_tool.plan.merge.context import MergeContext
from lora_tool.sources import source_of
from lora_tool.tensors import FileStamp

_NO_PAD = (
    "no pad_token_id: neither tokenizer nor base config names a pad token, so the merged model can only score one text at "
    "a time; set pad_token in tokenizer_config.json and merge again"
)


def build_plan(
    merge: MergeContext,
    steps: Sequence[Step],
    leftovers: Sequence[InputRecord],
    base: ModelDir,
    *,
    precision: Precision,
    max_shard_bytes: int | None,
    metadata: Mapping[str, str] | None = None,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan of these steps: shards of at most `max_shard_bytes`, else the base's own; side files; manifest.

    `base` is the one on disk, `metadata` goes into the headers of the weight files, `options` into the
    manifest.
    """
    adapters = {input_name(number): part.adapter for number, part in enumerate(merge.adapted, start=1)}
    read: dict[str, AdapterDir | ModelDir] = {"base": base, **adapters}
    fingerprints = {name: fingerprint(each.weights) for name, each in read.items()}
    files = sharding.base_files(steps, base.tensors)
    shards = sharding.lay_out(steps, homes=files, max_shard_bytes=max_shard_bytes, metadata=metadata)
    side_files, notes, warnings = _side_files(merge, base)
    side_files = (*side_files, *sharding.index_files(shards))
    weights = {
        name: {"weight": part.weight} for name, part in zip(adapters, merge.adapted, strict=True) if part.weight != 1
    }
    merged = [(each, fingerprints[name]) for name, each in adapters.items()]
    earlier = base.manifest.merged_adapters if base.manifest else ()
    return Plan(
        shards=shards,
        side_files=side_files,
        leftovers=tuple(leftovers),
        inputs=_stamps(merge, side_files, read.values()),
        precision=precision,
        warnings=warnings,
        notes=(
            _task_note(merge),
            *_weight_note(merge),
            *_one_delta_note(merge),
            *_left_out_notes(leftovers, base),
            *notes,
        ),
        # the tensors of one adapter need no telling apart
        input_names={each.root: name for name, each in read.items()} if read.keys() - {"base", "adapter"} else {},
        hashed=tuple(file.path for each in adapters.values() for file in each.weights.files),
        manifest={
            "operation": "merge",
            "task": (Task.SEQ_CLS if merge.task in CLASSIFIERS else merge.task).value,
            "num_labels": merge.labels,
            "dtype": merge.dtype.value if merge.dtype else "as in the base",
            **options,
            "merged_adapters": [
                *earlier,
                *([] if options.get("head_alone") else adapters_in(merged)),
            ],
            "inputs": {
                name: describe_input(source_of(each.root), each.weights, fingerprints[name]) | weights.get(name, {})
                for name, each in read.items()
            },
        },
    )


def _side_files(merge: MergeContext, base: ModelDir) -> tuple[tuple[SideFile, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files beside the weights, notes for the report, and warnings."""
    adapters = [part.adapter for part in merge.adapted]
    generation = generation_of(adapters, merge.base) if _generates(merge) else Generation()
    pad_id = None if merge.head is None else _pad_id(adapters, merge.base)
    modules = module_files(owners(adapters, merge.base), merge.task)
    files = (
        config_file(merge.base, _config_changes(merge, generation, pad_id)),
        *copied_files(adapters, merge.base, generation=merge.head is None and generation.file is None),
        *([generation.file] if generation.file else []),
        *modules.files,
        *quantisation_file(base, merge.base.whole_config),
    )
    warnings = (
        *([] if merge.dtype else another_dtype(merge.base)),
        *([_NO_PAD] if merge.head is not None and pad_id is None else []),
        *not_merged_beside(adapters),
        *other_tokenizers(adapters),
        *modules.warnings,
        *code_named(files),
    )
    left = left_out(merge.base, {file.filename for file in files})
    return files, (*generation.notes, *left, *modules.notes), warnings


def _config_changes(merge: MergeContext, generation: Generation, pad_id: int | None) -> dict[str, Any]:
    """Return what the merged model's config says otherwise than the base's; `pad_id` is a classifier's pad token."""
    base, vocabulary = merge.base, merge.ends.vocabulary
    return joined_changes(
        dtype_changes(base, merge.dtype),
        {} if merge.facts is None else {"architectures": [merge.facts.class_name]},
        {"tie_word_embeddings": False} if merge.ends.untied else {},
        {} if merge.head is not None or merge.labels is None else label_changes(base, merge.labels),
        {} if vocabulary is None else vocabulary_changes(base, vocabulary.size),
        generation.config,
        {}
        if merge.head is None
        else classifier_changes(base, merge.arch.sequence_classification or "", merge.head.num_labels, pad_id),
    )


def _pad_id(adapters: Sequence[AdapterDir], base: ModelDir) -> int | None:
    """Return the id of the pad token: the tokenizer's, else the base config's."""
    pad = pad_token(adapters, base)
    return pad.id if pad else base.whole_config.pad_token_id


def _generates(merge: MergeContext) -> bool:
    """Whether the merged model writes text: a causal LM, or another class that does."""
    name = merge.facts.class_name if merge.facts else ""
    return merge.task is Task.CAUSAL_LM or name.endswith(LANGUAGE_MODELS)


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
        others = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
        yield f"left out of the base: {names[0]}{others}: {reason}"


def _one_delta_note(merge: MergeContext) -> Iterator[str]:
    tied = merge.ends.tied
    if tied is not None and merge.ends.trained_as_one:
        output, embedding = (name.removesuffix(".weight") for name in (tied.output, tied.embedding.name))
        yield (
            f"`{output}` and `{embedding}` are one matrix and were trained with one ΔW, which the merge adds once; PEFT's merge "
            "adds it twice"
        )


def _task_note(merge: MergeContext) -> str:
    sources = " + ".join(
        str(part.adapter.root) if part.weight == 1 else f"{part.weight:g}·{part.adapter.root}" for part in merge.adapted
    )
    labels = "" if merge.labels is None else counted(merge.labels, "label")
    if merge.head is None:
        model = f"{merge.arch.causal_lm}, {labels}" if merge.labels is not None else merge.arch.causal_lm
        return f"merging {sources} into {from_here(merge.base.root)} as {model}"
    head = f"head from {merge.head.weight.path.parent}"
    return (
        f"merging {sources} into {from_here(merge.base.root)} as {merge.arch.sequence_classification}, {labels}, {head}"
    )


def _weight_note(merge: MergeContext) -> Iterator[str]:
    """Yield a note on the tensors that a weight does not scale."""
    for part in merge.adapted:
        whole = [*part.modules.saved, *part.modules.tokens]
        if part.weight != 1 and whole:
            others = f" and {counted(len(whole) - 1, 'other')}" if len(whole) > 1 else ""
            yield f"the weight {part.weight:g} scales only ΔW: {whole[0]}{others} of {part.adapter.root} stay as trained"


def _stamps(
    merge: MergeContext, side_files: tuple[SideFile, ...], read: Iterable[AdapterDir | ModelDir]
) -> tuple[FileStamp, ...]:
    weights = (merge.base.weights, *(part.adapter.weights for part in merge.adapted), *(each.weights for each in read))
    stamps: Mapping[str, FileStamp] = {str(stamp.path): stamp for each in weights for stamp in each.stamps}
    extra = {str(file.source): FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **extra}.values())

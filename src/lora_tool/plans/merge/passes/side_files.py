"""The files of the merged model that are not weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir, label_names
from lora_tool.core.choices import number_of_bytes
from lora_tool.core.options import Options, Section, option
from lora_tool.models.ends import LANGUAGE_MODELS
from lora_tool.plans.base.module_files import module_files
from lora_tool.plans.base.side_files import (
    SAME_GENERATION,
    Generation,
    another_dtype,
    classifier_changes,
    code_named,
    config_file,
    copied_files,
    dtype_changes,
    generation_of,
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
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.options import SHARD_SIZE
from lora_tool.plans.core.steps import base_files, index_files, lay_out
from lora_tool.plans.merge.draft import Draft, Head


@dataclass(frozen=True, kw_only=True)
class Shards(Options):
    """The option of this pass."""

    section = Section.OUTPUT

    max_shard_size: int | str | None = option(
        None, "Maximum size of a weights file.  [default: files as in the base]", **SHARD_SIZE
    )


def in_files(draft: Draft, options: Shards) -> Draft:
    """Return the draft with its steps in files of at most `max_shard_size`, else in those of the base, and their index."""
    size = None if options.max_shard_size is None else number_of_bytes(options.max_shard_size)
    homes = base_files(draft.steps, draft.inputs.stored.tensors)
    shards = lay_out(draft.steps, homes=homes, max_shard_bytes=size, metadata=draft.metadata)
    return replace(draft, shards=shards, side_files=(*draft.side_files, *index_files(shards)))


_NO_PAD = (
    "no pad_token_id: neither tokenizer nor base config names a pad token, so the merged model can only score one text at "
    "a time; set pad_token in tokenizer_config.json and merge again"
)


def with_side_files(draft: Draft, _: Options) -> Draft:
    """Return the draft with config, tokenizer, licences and what else goes with the weights."""
    adapters = [part.adapter for part in draft.adapted]
    generation = generation_of(adapters, draft.base) if _generates(draft) else SAME_GENERATION
    pad_id = None if draft.head is None else _pad_id(adapters, draft.base)
    modules = module_files(owners(adapters, draft.base), draft.model.task)
    files = (
        config_file(draft.base, _config_changes(draft, generation, pad_id)),
        *copied_files(adapters, draft.base, generation=draft.head is None and generation.file is None),
        *([generation.file] if generation.file else []),
        *modules.files,
        *quantisation_file(draft.inputs.stored, draft.base.whole_config),
    )
    warnings = (
        *([] if draft.dtype else another_dtype(draft.base)),
        *([_NO_PAD] if draft.head is not None and pad_id is None else []),
        *not_merged_beside(adapters),
        *(other_tokenizers(adapters) if len(adapters) > 1 else ()),
        *modules.warnings,
        *code_named(files),
    )
    left = left_out(draft.base, {file.filename for file in files})
    return replace(
        draft,
        side_files=(*files, *draft.side_files),
        notes=(*generation.notes, *left, *modules.notes, *draft.notes),
        warnings=(*warnings, *draft.warnings),
    )


def _config_changes(draft: Draft, generation: Generation, pad_id: int | None) -> dict[str, Any]:
    """Return the merged model's config fields that differ from the base's; `pad_id` is a classifier's pad token."""
    base, vocabulary = draft.base, draft.ends.vocabulary
    return joined_changes(
        dtype_changes(base, draft.dtype),
        {} if draft.model.facts is None else {"architectures": [draft.model.facts.class_name]},
        {"tie_word_embeddings": False} if draft.ends.untied else {},
        {} if draft.head is not None or draft.labels is None else label_changes(base, draft.labels),
        {} if vocabulary is None else vocabulary_changes(base, vocabulary.size),
        generation.config,
        {} if draft.head is None else _of_classifier(draft, draft.head, pad_id),
    )


def _of_classifier(draft: Draft, head: Head, pad_id: int | None) -> dict[str, Any]:
    """Return a classifier's config fields; its labels have the names that the adapter with the head gives them."""
    owner = next((part.adapter for part in draft.adapted if part.adapter.root == head.weight.path.parent), None)
    names = () if owner is None else label_names(owner)
    class_name = draft.model.arch.sequence_classification or ""
    return classifier_changes(draft.base, class_name, head.num_labels, pad_id, names)


def _pad_id(adapters: Sequence[AdapterDir], base: ModelDir) -> int | None:
    """Return the id of the pad token: the tokenizer's, else the base config's."""
    pad = pad_token(adapters, base)
    return pad.id if pad else base.whole_config.pad_token_id


def _generates(draft: Draft) -> bool:
    """Whether the merged model writes text: a causal LM, or another class that does."""
    name = draft.model.facts.class_name if draft.model.facts else ""
    return draft.model.task is Task.CAUSAL_LM or name.endswith(LANGUAGE_MODELS)

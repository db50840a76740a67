"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_tool.checkpoint import AdapterDir, ModelDir, require_whole
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.plan import layout
from lora_tool.plan.features import require_mergeable
from lora_tool.plan.manifest import describe_input, fingerprint
from lora_tool.plan.model import ExpertLayout, Plan, Precision, SideFile
from lora_tool.plan.modules import adapter_modules
from lora_tool.plan.side_files import (
    classifier_changes,
    config_file,
    copied_files,
    dtype_changes,
    left_out,
    pad_token,
)
from lora_tool.plan.steps import (
    Merge,
    adapter_leftovers,
    added_steps,
    base_steps,
    dropped_from_base,
    require_all_consumed,
)
from lora_tool.plan.storage import AsStored, plainly_stored, require_full_precision
from lora_tool.plan.task import Task, decide_task, find_head
from lora_tool.plan.tying import is_untied, require_no_lora_on_tied_ends, untying_steps
from lora_tool.tensors import DType, FileStamp

if TYPE_CHECKING:
    from lora_tool.plan.mapped import Mapped

_WITH_PEFT = "merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOrigin:
    """Hub id and commit of an input, for the manifest; both None for a local folder."""

    hub_id: str | None = None
    revision: str | None = None


LOCAL = HubOrigin()


def plan_merge(
    base: ModelDir,
    adapter: AdapterDir,
    *,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | None = None,
    precision: Precision | str = Precision.FLOAT32,
    max_shard_bytes: int | None = None,
    expert_layout: ExpertLayout | None = None,
    base_origin: HubOrigin = LOCAL,
    adapter_origin: HubOrigin = LOCAL,
) -> Plan:
    """Return the plan that merges `adapter` into `base`. Reads headers and a few KB of samples; writes nothing.

    `task` "reward" means one label. `dtype` None keeps every tensor's own. `max_shard_bytes` None keeps the base's
    grouping into files. Every tensor of both inputs is in the plan, as a step or as a leftover with its reason.
    Raises `CorruptFile` or `BadConfig` for a broken input, `UnsupportedAdapter` for what cannot be merged exactly,
    `IncompatibleBase` where the two do not fit.
    """
    require_whole(base)
    require_whole(adapter)
    config = _require_config(adapter)
    require_mergeable(config)
    require_full_precision(base)
    named = _named(base, adapter, config, Task(task))
    arch, decided = named.arch, named.task
    modules = adapter_modules(named.adapter, config, facts=named.facts, expert_layout=expert_layout)
    if not modules.lora and not modules.parameters and not modules.saved:
        raise UnsupportedAdapter(
            f"{adapter.root}: the adapter holds no LoRA tensors: there is nothing to merge",
            hint=f"lora-tool validate {adapter.root}",
        )
    wanted = 1 if decided is Task.REWARD and num_labels is None else num_labels
    head = None
    if decided is Task.CAUSAL_LM and arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{base.root}: {arch.model_type} has no causal LM that is stored as it is in memory", hint=_WITH_PEFT
        )
    if decided is not Task.CAUSAL_LM:
        head = find_head(adapter, modules, named.base, arch, num_labels=wanted)
    modules, per_expert = named.parts_of_fused(modules)
    merge = Merge(
        base=named.base,
        adapter=named.adapter,
        config=config,
        arch=arch,
        modules=modules,
        head=head,
        dtype=dtype,
        facts=named.facts,
        fresh=named.fresh,
    )
    adapter_print = fingerprint(adapter.weights)
    _require_not_merged_before(merge, adapter_print)
    require_no_lora_on_tied_ends(merge)
    steps = named.on_disk((*base_steps(merge), *added_steps(merge), *untying_steps(merge)), per_expert)
    leftovers = (*dropped_from_base(merge), *named.leftovers, *adapter_leftovers(merge))
    require_all_consumed(merge, steps, leftovers)
    homes = layout.homes(steps, base.tensors)
    shards = layout.lay_out(steps, homes=homes, max_shard_bytes=max_shard_bytes)
    side_files, notes, warnings = _side_files(merge)
    if len(shards) > 1:
        index = SideFile(filename=layout.INDEX, content=layout.index_json(shards), reason="written for the new weights")
        side_files = (*side_files, index)
    earlier = base.manifest.merged_adapters if base.manifest else ()
    return Plan(
        shards=shards,
        side_files=side_files,
        leftovers=leftovers,
        inputs=_inputs(merge, side_files),
        precision=Precision(precision),
        warnings=warnings,
        notes=(_task_note(merge), *notes),
        hashed=tuple(file.path for file in adapter.weights.files),
        manifest={
            "operation": "merge",
            "task": decided.value if decided is Task.CAUSAL_LM else Task.SEQ_CLS.value,
            "num_labels": head.num_labels if head else None,
            "dtype": dtype.value if dtype else "as in the base",
            "merged_adapters": [*earlier, adapter_print],
            "inputs": {
                "base": describe_input(
                    base.root,
                    base.weights,
                    hub_id=base_origin.hub_id,
                    revision=base_origin.revision,
                    print_=fingerprint(base.weights),
                ),
                "adapter": describe_input(
                    adapter.root,
                    adapter.weights,
                    hub_id=adapter_origin.hub_id,
                    revision=adapter_origin.revision,
                    print_=adapter_print,
                ),
            },
        },
    )


def _named(base: ModelDir, adapter: AdapterDir, config: AdapterConfig, task: Task) -> AsStored | Mapped:
    """Return both inputs in the names of memory: as they are, or by transformers' mapping, for which it is imported."""
    arch = plainly_stored(base, adapter, config)
    if arch is not None:
        decided = decide_task(task, adapter, config, base, arch)
        return AsStored(base=base, adapter=adapter, arch=arch, task=decided)
    from lora_tool.plan.mapped import mapped, read_names  # noqa: PLC0415 - imports torch and transformers

    readings = read_names(base, adapter)
    return mapped(readings, adapter, decide_task(task, adapter, config, base, readings.architecture))


def _require_config(adapter: AdapterDir) -> AdapterConfig:
    if adapter.config is None:
        raise AssertionError("a whole adapter has a config")
    return adapter.config


def _require_not_merged_before(merge: Merge, adapter_print: str) -> None:
    manifest = merge.base.manifest
    if manifest is not None and adapter_print in manifest.merged_adapters:
        raise IncompatibleBase(
            f"{merge.base.root} is a merged model that holds this very adapter already: "
            "merging again would apply it twice",
            hint="give the model that the adapter was trained on: --base MODEL",
        )


def _side_files(merge: Merge) -> tuple[tuple[SideFile, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files beside the weights, notes for the report, and warnings."""
    changes: dict[str, object] = dict(dtype_changes(merge.base, merge.dtype))
    if merge.facts is not None:
        changes["architectures"] = [merge.facts.class_name]
    if is_untied(merge):
        changes["tie_word_embeddings"] = False
    warnings: list[str] = []
    if merge.head is not None:
        pad = pad_token(merge.adapter, merge.base)
        pad_id = pad.id if pad else merge.base.config.pad_token_id if merge.base.config else None
        if pad_id is None:
            warnings.append(
                "no pad_token_id: neither tokenizer nor base config names a pad token, so the merged model can only "
                "score one text at a time; set pad_token in tokenizer_config.json and merge again"
            )
        class_name = merge.arch.sequence_classification or ""
        changes |= classifier_changes(merge.base, class_name, merge.head.num_labels, pad_id)
    files = (config_file(merge.base, changes), *copied_files(merge.adapter, merge.base, generation=merge.head is None))
    left = left_out(merge.base, {file.filename for file in files})
    notes = (f"not copied from the base: {', '.join(left)}",) if left else ()
    return files, notes, tuple(warnings)


def _task_note(merge: Merge) -> str:
    if merge.head is None:
        return f"merging {merge.adapter.root} into {merge.base.root} as {merge.arch.causal_lm}"
    labels = "1 label" if merge.head.num_labels == 1 else f"{merge.head.num_labels} labels"
    head = f"head from {merge.head.weight.path.parent}"
    return (
        f"merging {merge.adapter.root} into {merge.base.root} as {merge.arch.sequence_classification}, {labels}, {head}"
    )


def _inputs(merge: Merge, side_files: tuple[SideFile, ...]) -> tuple[FileStamp, ...]:
    stamps: Mapping[str, FileStamp] = {
        str(stamp.path): stamp for stamp in (*merge.base.weights.stamps, *merge.adapter.weights.stamps)
    }
    extra = {str(file.source): FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **extra}.values())

"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.checkpoint import AdapterDir, ModelDir, require_whole
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.plan import layout
from lora_tool.plan.adapters import Adapted, join
from lora_tool.plan.architectures import Architecture
from lora_tool.plan.ends import (
    end_names,
    other_vocabulary,
    tied_copies,
    tied_ends,
    trained_apart,
    with_vocabulary,
    without_tied_repeats,
)
from lora_tool.plan.features import require_mergeable
from lora_tool.plan.manifest import describe_input, fingerprint
from lora_tool.plan.model import ExpertLayout, LoraDelta, Plan, Precision, SideFile, Step
from lora_tool.plan.modules import AdapterModules, adapter_modules
from lora_tool.plan.side_files import (
    classifier_changes,
    config_file,
    copied_files,
    dtype_changes,
    left_out,
    other_tokenizers,
    pad_token,
    vocabulary_changes,
)
from lora_tool.plan.steps import (
    Merge,
    adapter_leftovers,
    added_steps,
    base_steps,
    dropped_from_base,
    require_all_consumed,
    require_whole_inits,
)
from lora_tool.plan.storage import AsStored, plainly_stored, require_full_precision
from lora_tool.plan.task import Head, Task, decide_task, find_head
from lora_tool.plan.tying import require_no_lora_on_tied_ends, untying_steps
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
    adapter: AdapterDir | Sequence[AdapterDir],
    *,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | None = None,
    precision: Precision | str = Precision.FLOAT32,
    untie: bool = False,
    max_shard_bytes: int | None = None,
    expert_layout: ExpertLayout | None = None,
    base_origin: HubOrigin = LOCAL,
    adapter_origin: HubOrigin | Sequence[HubOrigin] = LOCAL,
) -> Plan:
    """Return the plan that merges `adapter`, or several of them, into `base`. Reads headers and a few KB of samples;
    writes nothing.

    The deltas of several adapters are summed, in their order. `task` "reward" means one label. `dtype` None keeps
    every tensor's own. `untie` gives tied embeddings two matrices, each as it was trained. `max_shard_bytes` None keeps the base's grouping into files. Every tensor of all inputs is in
    the plan, as a step or as a leftover with its reason. `adapter_origin` has one entry per adapter where there are
    several. Raises `CorruptFile` or `BadConfig` for a broken input, `UnsupportedAdapter` for what cannot be merged
    exactly, `IncompatibleBase` where base and adapter do not fit.
    """
    adapters = (adapter,) if isinstance(adapter, AdapterDir) else tuple(adapter)
    require_whole(base)
    for each in adapters:
        require_whole(each)
        require_mergeable(_require_config(each))
    require_full_precision(base)
    named = _named(base, adapters, Task(task))
    arch, decided = named.arch, named.task
    adapted, modules = join([_adapted(each, named, expert_layout) for each in named.adapters])
    wanted = 1 if decided is Task.REWARD and num_labels is None else num_labels
    head = None
    if decided is Task.CAUSAL_LM and arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{base.root}: {arch.model_type} has no causal LM that is stored as it is in memory", hint=_WITH_PEFT
        )
    if decided is not Task.CAUSAL_LM:
        head = find_head(adapters[0], modules, named.base, arch, num_labels=wanted)
    modules, per_expert = named.parts_of_fused(modules, Precision(precision))
    merge = _merge(named, adapted, modules, head=head, dtype=dtype, untie=untie)
    prints = [fingerprint(each.weights) for each in adapters]
    _require_not_merged_before(base, adapters, prints)
    require_no_lora_on_tied_ends(merge)
    steps = named.on_disk((*base_steps(merge), *added_steps(merge), *untying_steps(merge)), per_expert)
    leftovers = (*dropped_from_base(merge), *named.leftovers, *adapter_leftovers(merge))
    require_all_consumed(merge, steps, leftovers)
    require_whole_inits(steps)
    _require_same_everywhere(steps, Precision(precision))
    homes = layout.homes(steps, base.tensors)
    shards = layout.lay_out(steps, homes=homes, max_shard_bytes=max_shard_bytes)
    side_files, notes, warnings = _side_files(merge)
    if len(shards) > 1:
        index = SideFile(filename=layout.INDEX, content=layout.index_json(shards), reason="written for the new weights")
        side_files = (*side_files, index)
    earlier = base.manifest.merged_adapters if base.manifest else ()
    origins = (adapter_origin,) * len(adapters) if isinstance(adapter_origin, HubOrigin) else tuple(adapter_origin)
    names = _adapter_names(adapters)
    return Plan(
        shards=shards,
        side_files=side_files,
        leftovers=leftovers,
        inputs=_inputs(merge, side_files),
        precision=Precision(precision),
        warnings=warnings,
        notes=(_task_note(merge), *notes),
        input_names=_input_names(base, adapters),
        hashed=tuple(file.path for each in adapters for file in each.weights.files),
        manifest={
            "operation": "merge",
            "task": decided.value if decided is Task.CAUSAL_LM else Task.SEQ_CLS.value,
            "num_labels": head.num_labels if head else None,
            "dtype": dtype.value if dtype else "as in the base",
            "untie": untie,
            "expert_layout": expert_layout.value if expert_layout else None,
            "merged_adapters": [*earlier, *prints],
            "inputs": {
                "base": describe_input(
                    base.root,
                    base.weights,
                    hub_id=base_origin.hub_id,
                    revision=base_origin.revision,
                    print_=fingerprint(base.weights),
                ),
                **{
                    name: describe_input(
                        each.root, each.weights, hub_id=origin.hub_id, revision=origin.revision, print_=print_
                    )
                    for name, each, origin, print_ in zip(names, adapters, origins, prints, strict=True)
                },
            },
        },
    )


def _require_same_everywhere(steps: Sequence[Step], precision: Precision) -> None:
    inits = [step.op.init for step in steps if isinstance(step.op, LoraDelta) and step.op.init]
    if inits and precision is Precision.FLOAT64:
        raise UnsupportedAdapter(
            f"`init_lora_weights` {inits[0]} is recomputed with torch, whose bits depend on the machine: "
            "--precision float64 promises the same bytes everywhere",
            hint="--precision peft gives PEFT's own bits on this machine",
        )


def _named(base: ModelDir, adapters: Sequence[AdapterDir], task: Task) -> AsStored | Mapped:
    """Return the inputs in the names of memory: as they are, or by transformers' mapping, for which it is imported."""
    arch = plainly_stored(base, adapters, task)
    if arch is not None:
        return AsStored(base=base, adapters=adapters, arch=arch, task=_decide_task(task, adapters, base, arch))
    from lora_tool.plan.mapped import mapped, read_names  # noqa: PLC0415 - imports torch and transformers

    readings = read_names(base, adapters)
    return mapped(readings, adapters, _decide_task(task, adapters, base, readings.architecture))


def _merge(
    named: AsStored | Mapped,
    adapted: tuple[Adapted, ...],
    modules: AdapterModules,
    *,
    head: Head | None,
    dtype: DType | None,
    untie: bool,
) -> Merge:
    """Return everything that the steps are made from, with the ends of the model settled."""
    base, arch, facts = named.base, named.arch, named.facts
    copies = tied_copies(base, arch, facts) if head is None else {}
    ends = tied_ends(base, arch, facts, copies) if head is None else None
    says_tied = base.config is not None and base.config.tie_word_embeddings is True
    # transformers leaves two ends that differ on disk apart, whatever the config says, and PEFT then corrects it
    untied = head is None and says_tied and ends is None and bool(arch.causal_only)
    if ends is not None:
        untied = untie or trained_apart(ends, adapted)
        if not untied:
            adapted, modules = without_tied_repeats(ends, adapted, modules)
    vocabulary = other_vocabulary(base, arch, modules)
    if vocabulary is not None:
        dropped = frozenset(copies) | (frozenset(arch.causal_only) if head is not None else frozenset())
        base = with_vocabulary(base, vocabulary, modules, dropped)
    return Merge(
        base=base,
        adapted=adapted,
        arch=arch,
        modules=modules,
        head=head,
        dtype=dtype,
        tied_copies=copies,
        facts=facts,
        fresh=named.fresh,
        ends=ends,
        untied=untied,
        vocabulary=vocabulary,
    )


def _adapted(adapter: AdapterDir, named: AsStored | Mapped, expert_layout: ExpertLayout | None) -> Adapted:
    config = _require_config(adapter)
    ends = end_names(named.base, named.arch)
    modules = adapter_modules(adapter, config, facts=named.facts, expert_layout=expert_layout, ends=ends)
    if not modules.lora and not modules.parameters and not modules.saved:
        raise UnsupportedAdapter(
            f"{adapter.root}: the adapter holds no LoRA tensors: there is nothing to merge",
            hint=f"lora-tool validate {adapter.root}",
        )
    return Adapted(adapter=adapter, config=config, modules=modules)


def _adapter_names(adapters: Sequence[AdapterDir]) -> tuple[str, ...]:
    """Return each adapter's name in the manifest: `adapter`, then `adapter 2` and so on."""
    return tuple("adapter" if number == 1 else f"adapter {number}" for number in range(1, len(adapters) + 1))


def _input_names(base: ModelDir, adapters: Sequence[AdapterDir]) -> dict[Path, str]:
    """Return folder → name in the manifest where there are several adapters; tensors of one need no telling apart."""
    if len(adapters) == 1:
        return {}
    return {base.root: "base", **dict(zip((each.root for each in adapters), _adapter_names(adapters), strict=True))}


def _decide_task(task: Task, adapters: Sequence[AdapterDir], base: ModelDir, arch: Architecture) -> Task:
    """Return what all adapters say; one that says nothing follows the others. Raises `UnsupportedAdapter`."""
    configs = [_require_config(adapter) for adapter in adapters]
    votes = [decide_task(task, each, config, base, arch) for each, config in zip(adapters, configs, strict=True)]
    silent = [vote is Task.CAUSAL_LM and not config.task_type for vote, config in zip(votes, configs, strict=True)]
    heard = {vote for vote, says_nothing in zip(votes, silent, strict=True) if not says_nothing} or set(votes)
    if len(heard) > 1:
        tasks = ", ".join(f"{each.root}: {vote}" for each, vote in zip(adapters, votes, strict=True))
        raise UnsupportedAdapter(f"the adapters are for different tasks ({tasks}), so one model cannot hold them")
    return heard.pop()


def _require_config(adapter: AdapterDir) -> AdapterConfig:
    if adapter.config is None:
        raise AssertionError("a whole adapter has a config")
    return adapter.config


def _require_not_merged_before(base: ModelDir, adapters: Sequence[AdapterDir], prints: Sequence[str]) -> None:
    for at, (adapter, print_) in enumerate(zip(adapters, prints, strict=True)):
        if print_ in prints[:at]:
            raise IncompatibleBase(
                f"{adapter.root} holds the same weights as {adapters[prints.index(print_)].root}: "
                "they would be merged twice",
                hint="give each adapter once",
            )
        if base.manifest is not None and print_ in base.manifest.merged_adapters:
            raise IncompatibleBase(
                f"{base.root} is a merged model that holds this very adapter already ({adapter.root}): "
                "merging again would apply it twice",
                hint="give the model that the adapter was trained on: --base MODEL",
            )


def _side_files(merge: Merge) -> tuple[tuple[SideFile, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files beside the weights, notes for the report, and warnings."""
    changes: dict[str, object] = dict(dtype_changes(merge.base, merge.dtype))
    if merge.facts is not None:
        changes["architectures"] = [merge.facts.class_name]
    if merge.untied:
        changes["tie_word_embeddings"] = False
    if merge.vocabulary is not None:
        changes |= vocabulary_changes(merge.base, merge.vocabulary.size)
    adapters = [part.adapter for part in merge.adapted]
    warnings: list[str] = []
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
    files = (config_file(merge.base, changes), *copied_files(adapters, merge.base, generation=merge.head is None))
    warnings += other_tokenizers(adapters)
    left = left_out(merge.base, {file.filename for file in files})
    notes = (f"not copied from the base: {', '.join(left)}",) if left else ()
    return files, notes, tuple(warnings)


def _task_note(merge: Merge) -> str:
    sources = " + ".join(str(part.adapter.root) for part in merge.adapted)
    if merge.head is None:
        return f"merging {sources} into {merge.base.root} as {merge.arch.causal_lm}"
    labels = "1 label" if merge.head.num_labels == 1 else f"{merge.head.num_labels} labels"
    head = f"head from {merge.head.weight.path.parent}"
    return f"merging {sources} into {merge.base.root} as {merge.arch.sequence_classification}, {labels}, {head}"


def _inputs(merge: Merge, side_files: tuple[SideFile, ...]) -> tuple[FileStamp, ...]:
    weights = (merge.base.weights, *(part.adapter.weights for part in merge.adapted))
    stamps: Mapping[str, FileStamp] = {str(stamp.path): stamp for each in weights for stamp in each.stamps}
    extra = {str(file.source): FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **extra}.values())

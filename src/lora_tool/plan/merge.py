"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_tool.checkpoint import AdapterDir, ModelDir, require_whole
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.keys import Part
from lora_tool.plan import layout
from lora_tool.plan.architectures import Architecture, architecture_of
from lora_tool.plan.features import require_mergeable
from lora_tool.plan.manifest import describe_input, fingerprint
from lora_tool.plan.model import (
    BiasDelta,
    Cast,
    Copy,
    Fate,
    Leftover,
    LoraDelta,
    Op,
    Plan,
    Precision,
    SideFile,
    Step,
)
from lora_tool.plan.modules import AdapterModules, adapter_modules
from lora_tool.plan.side_files import (
    classifier_changes,
    config_file,
    copied_files,
    dtype_changes,
    left_out,
    model_dtype,
    pad_token,
)
from lora_tool.plan.task import Head, Task, decide_task, find_head
from lora_tool.tensors import DType, FileStamp, StoredTensor, TensorSpec

_MATRIX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOrigin:
    """Hub id and commit of an input, for the manifest; both None for a local folder."""

    hub_id: str | None = None
    revision: str | None = None


LOCAL = HubOrigin()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merge:
    """Everything that the steps are made from."""

    base: ModelDir
    adapter: AdapterDir
    config: AdapterConfig
    arch: Architecture
    modules: AdapterModules
    head: Head | None
    dtype: DType | None


def plan_merge(
    base: ModelDir,
    adapter: AdapterDir,
    *,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | None = None,
    precision: Precision | str = Precision.FLOAT32,
    max_shard_bytes: int | None = None,
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
    arch = _require_architecture(base)
    modules = adapter_modules(adapter, config)
    if not modules.lora and not modules.saved:
        raise UnsupportedAdapter(
            f"{adapter.root}: the adapter holds no LoRA tensors: there is nothing to merge",
            hint=f"lora-tool validate {adapter.root}",
        )
    decided = decide_task(Task(task), adapter, config, base, arch)
    wanted = 1 if decided is Task.REWARD and num_labels is None else num_labels
    head = None
    if decided is not Task.CAUSAL_LM:
        head = find_head(adapter, modules, base, arch, num_labels=wanted)
    merge = _Merge(base=base, adapter=adapter, config=config, arch=arch, modules=modules, head=head, dtype=dtype)
    adapter_print = fingerprint(adapter.weights)
    _require_not_merged_before(merge, adapter_print)
    _require_untied(merge)
    steps = (*_base_steps(merge), *_added_steps(merge))
    leftovers = (*_dropped_from_base(merge), *_adapter_leftovers(merge))
    _require_all_consumed(merge, steps, leftovers)
    homes = {name: tensor.path.name for name, tensor in base.tensors.items()}
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


def _require_config(adapter: AdapterDir) -> AdapterConfig:
    if adapter.config is None:
        raise AssertionError("a whole adapter has a config")
    return adapter.config


def _require_architecture(base: ModelDir) -> Architecture:
    """Return what is known of the base's model type. Raises `UnsupportedAdapter` for what is not stored plainly."""
    config = base.config
    if config is None:
        raise AssertionError("a whole model has a config")
    if config.quantization:
        raise UnsupportedAdapter(
            f"{config.path}: the base is quantised ({config.quantization}): merging into rounded weights is not exact",
            hint="give the full-precision model that it was made from: --base MODEL",
        )
    arch = architecture_of(config.model_type or "")
    if arch is None or config.custom_code:
        why = "has its own code (auto_map)" if arch is not None else "is not known to be stored as it is in memory"
        raise UnsupportedAdapter(
            f"{config.path}: model_type {config.model_type} {why}",
            hint="merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()",
        )
    quantised = next((t for t in base.tensors.values() if t.dtype.value.startswith(("F8", "F4", "F6"))), None)
    if quantised is not None:
        raise UnsupportedAdapter(
            f"{quantised.path}: `{quantised.name}` is {quantised.dtype}: the base is quantised",
            hint="give the full-precision model that it was made from: --base MODEL",
        )
    return arch


def _require_not_merged_before(merge: _Merge, adapter_print: str) -> None:
    manifest = merge.base.manifest
    if manifest is not None and adapter_print in manifest.merged_adapters:
        raise IncompatibleBase(
            f"{merge.base.root} is a merged model that holds this very adapter already: "
            "merging again would apply it twice",
            hint="give the model that the adapter was trained on: --base MODEL",
        )


def _require_untied(merge: _Merge) -> None:
    """Raise where a saved embedding would also become the output layer, because the base ties the two."""
    tied = merge.head is None and merge.arch.causal_only and not set(merge.arch.causal_only) & set(merge.base.tensors)
    vocab_size = merge.base.config.vocab_size if merge.base.config else None
    for name, tensor in merge.modules.saved.items():
        if tied and len(tensor.shape) == _MATRIX and tensor.shape[0] == vocab_size:
            raise UnsupportedAdapter(
                f"{tensor.path}: `{tensor.name}` replaces the embedding `{name}`, which is tied to the output layer of "
                "this base: both ends would change, though only one was trained",
                hint="merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()",
            )


def _module_and_leaf(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _base_steps(merge: _Merge) -> Iterator[Step]:
    for tensor in merge.base.tensors.values():
        if not _is_dropped(merge, tensor.name):
            yield _step(merge, tensor)


def _is_dropped(merge: _Merge, name: str) -> bool:
    return merge.head is not None and name in merge.arch.causal_only


def _step(merge: _Merge, tensor: StoredTensor) -> Step:
    module, leaf = _module_and_leaf(tensor.name)
    modules = merge.modules
    saved = modules.saved.get(tensor.name)
    if saved is not None:
        return _replacement(merge, tensor, saved)
    if leaf == "weight" and module in modules.lora:
        return _lora_step(merge, tensor, tensor.name, module)
    if leaf == "bias" and module in modules.lora_bias:
        term = modules.lora_bias[module]
        _require_same_shape(term.bias, tensor)
        op: Op = BiasDelta(source=tensor, terms=(term,))
        return Step(out=_spec(merge, tensor), op=op, fate=Fate.MERGED, reason=f"lora_B bias, scaling {term.scaling:g}")
    return _plain_step(merge, tensor, tensor.name, Fate.COPIED, "as in the base")


def _spec(merge: _Merge, tensor: StoredTensor, name: str | None = None) -> TensorSpec:
    dtype = merge.dtype if merge.dtype and tensor.dtype.is_float else tensor.dtype
    return TensorSpec(name=name or tensor.name, dtype=dtype, shape=tensor.shape)


def _plain_step(merge: _Merge, tensor: StoredTensor, name: str, fate: Fate, reason: str) -> Step:
    out = _spec(merge, tensor, name)
    if out.dtype is tensor.dtype:
        return Step(out=out, op=Copy(source=tensor), fate=fate, reason=reason)
    cast_fate = Fate.CAST if fate is Fate.COPIED else fate
    return Step(out=out, op=Cast(source=tensor), fate=cast_fate, reason=f"{reason}, {tensor.dtype} to {out.dtype}")


def _replacement(merge: _Merge, base: StoredTensor, saved: StoredTensor) -> Step:
    _require_same_shape(saved, base)
    dtype = merge.dtype or base.dtype
    out = TensorSpec(name=base.name, dtype=dtype, shape=saved.shape)
    op: Op = Copy(source=saved) if saved.dtype is dtype else Cast(source=saved)
    return Step(out=out, op=op, fate=Fate.REPLACED, reason=f"modules_to_save, {saved.dtype} in the adapter")


def _lora_step(merge: _Merge, source: StoredTensor, name: str, module: str) -> Step:
    term = merge.modules.lora[module]
    transposed = module.rpartition(".")[2] in merge.arch.conv1d
    needed = (term.a.shape[1], term.b.shape[0]) if transposed else (term.b.shape[0], term.a.shape[1])
    if source.shape != needed:
        raise IncompatibleBase(
            f"{source.path}: `{source.name}` is {list(source.shape)}, the adapter's lora_B·lora_A is {list(needed)}",
            hint="give the model that the adapter was trained on: --base MODEL",
        )
    if not source.dtype.is_float:
        raise IncompatibleBase(f"{source.path}: `{source.name}` is {source.dtype}, expected F32, BF16, F16 or F64")
    out = TensorSpec(name=name, dtype=merge.dtype or _home_dtype(merge, source), shape=source.shape)
    op = LoraDelta(source=source, terms=(term,), transposed=transposed)
    reason = f"LoRA rank {term.a.shape[0]}, scaling {term.scaling:g}"
    return Step(out=out, op=op, fate=Fate.MERGED, reason=reason)


def _home_dtype(merge: _Merge, source: StoredTensor) -> DType:
    """Return the output's type: the base's tensors keep theirs; a head that the adapter brings takes the model's."""
    in_base = source.name in merge.base.tensors
    return source.dtype if in_base else model_dtype(merge.base) or source.dtype


def _require_same_shape(found: StoredTensor, base: StoredTensor) -> None:
    if found.shape != base.shape:
        raise IncompatibleBase(
            f"{found.path}: `{found.name}` is {list(found.shape)}, the base's `{base.name}` is {list(base.shape)}",
            hint="give the model that the adapter was trained on: --base MODEL",
        )


def _added_steps(merge: _Merge) -> Iterator[Step]:
    """Yield steps for the tensors that the base does not have: the head's."""
    for name, tensor in merge.modules.saved.items():
        if name in merge.base.tensors:
            continue
        if merge.head is None or not name.startswith(f"{merge.head.module}."):
            raise _not_in_base(merge, tensor, name)
        dtype = merge.dtype or model_dtype(merge.base) or tensor.dtype
        op: Op = Copy(source=tensor) if tensor.dtype is dtype else Cast(source=tensor)
        out = TensorSpec(name=name, dtype=dtype, shape=tensor.shape)
        yield Step(out=out, op=op, fate=Fate.ADDED, reason=f"the trained head, {tensor.dtype} in the adapter")
    head = merge.head
    if head is not None and f"{head.module}.weight" in merge.modules.frozen_base:
        name = f"{head.module}.weight"
        if head.module in merge.modules.lora:
            yield _lora_step(merge, merge.modules.frozen_base[name], name, head.module)


def _not_in_base(merge: _Merge, tensor: StoredTensor, name: str) -> IncompatibleBase:
    close = difflib.get_close_matches(name, merge.base.tensors, n=1)
    nearest = f"; the nearest there is `{close[0]}`" if close else ""
    return IncompatibleBase(
        f"{tensor.path}: `{tensor.name}` belongs to `{name}`, which {merge.base.root} does not have{nearest}",
        hint="give the model that the adapter was trained on: --base MODEL",
    )


def _dropped_from_base(merge: _Merge) -> Iterator[Leftover]:
    for tensor in merge.base.tensors.values():
        if _is_dropped(merge, tensor.name):
            reason = f"a {merge.arch.sequence_classification} has no language model head"
            yield Leftover(path=tensor.path, name=tensor.name, fate=Fate.DROPPED, reason=reason)


def _adapter_leftovers(merge: _Merge) -> Iterator[Leftover]:
    for name, key in merge.adapter.keys.items():
        path = merge.adapter.tensors[name].path
        if name in merge.modules.dropped:
            yield Leftover(path=path, name=name, fate=Fate.DROPPED, reason=merge.modules.dropped[name])
        elif key.part is not Part.PLAIN:
            target = f"{key.module}.{key.leaf if key.leaf == 'bias' else 'weight'}"
            yield Leftover(path=path, name=name, fate=Fate.CONSUMED, reason=f"in {target}")
        else:
            yield Leftover(path=path, name=name, fate=Fate.CONSUMED, reason=f"is {key.tensor}")


def _require_all_consumed(merge: _Merge, steps: tuple[Step, ...], leftovers: tuple[Leftover, ...]) -> None:
    """Raise unless every adapter tensor is in a step or dropped by name, and every target of the config has tensors."""
    used = {tensor.name for step in steps for tensor in _adapter_tensors(step.op)}
    dropped = {item.name for item in leftovers if item.fate is Fate.DROPPED and item.name in merge.adapter.tensors}
    for name, key in merge.adapter.keys.items():
        if name not in used and name not in dropped:
            leaf = "bias" if key.leaf == "bias" else "weight"
            wanted = key.tensor if key.part is Part.PLAIN else f"{key.module}.{leaf}"
            raise _unplaced(merge, merge.adapter.tensors[name], wanted)
    forgotten = [module for module in _targeted(merge) if module not in merge.modules.lora]
    if forgotten:
        raise UnsupportedAdapter(
            f"{merge.adapter.root}: `target_modules` names {len(forgotten)} modules of the base that have no LoRA "
            f"tensors in the adapter, the first is `{forgotten[0]}`: the adapter is incomplete",
            hint=f"lora-tool validate {merge.adapter.root} --base {merge.base.root}",
        )


def _unplaced(merge: _Merge, tensor: StoredTensor, wanted: str) -> IncompatibleBase | UnsupportedAdapter:
    if wanted in merge.base.tensors and _is_dropped(merge, wanted):
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which a sequence classifier does not have",
            hint="merge it as a causal LM: --task causal-lm",
        )
    if wanted in merge.arch.causal_only and wanted not in merge.base.tensors:
        return IncompatibleBase(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which is tied to the embeddings of this base: "
            "changing it would change both ends",
        )
    return _not_in_base(merge, tensor, wanted)


def _adapter_tensors(op: Op) -> Iterator[StoredTensor]:
    match op:
        case Copy() | Cast():
            yield op.source
        case LoraDelta():
            yield op.source
            for term in op.terms:
                yield from (term.a, term.b)
        case BiasDelta():
            for bias in op.terms:
                yield bias.bias


def _targeted(merge: _Merge) -> Iterator[str]:
    for tensor in merge.base.tensors.values():
        module, leaf = _module_and_leaf(tensor.name)
        matrix = leaf == "weight" and len(tensor.shape) == _MATRIX
        if matrix and not _is_dropped(merge, tensor.name) and merge.config.targets(module):
            yield module


def _side_files(merge: _Merge) -> tuple[tuple[SideFile, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files beside the weights, notes for the report, and warnings."""
    changes: dict[str, object] = dict(dtype_changes(merge.base, merge.dtype))
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


def _task_note(merge: _Merge) -> str:
    if merge.head is None:
        return f"merging {merge.adapter.root} into {merge.base.root} as {merge.arch.causal_lm}"
    labels = "1 label" if merge.head.num_labels == 1 else f"{merge.head.num_labels} labels"
    head = f"head from {merge.head.weight.path.parent}"
    return (
        f"merging {merge.adapter.root} into {merge.base.root} as {merge.arch.sequence_classification}, {labels}, {head}"
    )


def _inputs(merge: _Merge, side_files: tuple[SideFile, ...]) -> tuple[FileStamp, ...]:
    stamps: Mapping[str, FileStamp] = {
        str(stamp.path): stamp for stamp in (*merge.base.weights.stamps, *merge.adapter.weights.stamps)
    }
    extra = {str(file.source): FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **extra}.values())

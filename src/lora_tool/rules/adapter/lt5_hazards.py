"""LT507 to LT511: an adapter that fits its base by most names and shapes, and is wrong for it all the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from lora_tool.adapters.targeting import add_the_same
from lora_tool.checkpoints import ModelDir, computed_from, open_model
from lora_tool.checkpoints.sources import local_folder, moved_to, resolve, source_of
from lora_tool.core.display import from_here
from lora_tool.core.errors import BadConfig, CheckpointError, CorruptFile
from lora_tool.core.hub_names import hub_id_of
from lora_tool.core.report import Severity
from lora_tool.formats import training_record
from lora_tool.formats.files import inside
from lora_tool.formats.training_record import TrainingRecord, read_training_record
from lora_tool.models.ends import is_end, output_name
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})


@rule("LT507", Severity.ERROR, on=AdapterSubject)
def other_base(subject: AdapterSubject) -> Iterator[Fault | Unchecked]:
    """Not the base that the adapter was trained on.

    What it does: Compares the base with the fingerprint that `lora-tool train` recorded in `lora_tool_train.json`:
    names, dtypes, shapes and samples of all weights.
    Why it matters: Models of one family have the same names and shapes. PEFT silently loads the adapter onto any of
    them, and the result is garbage that looks fluent.
    Example: The adapter was trained on `Qwen2.5-7B-Instruct`, but `--base` is `Qwen2.5-7B`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`. If `--base` is that model converted to
    another dtype, which this rule cannot know: `--ignore LT507`.
    """
    path = _record_of(subject)
    if path is None:
        return
    try:
        record = read_training_record(path)
    except (CorruptFile, BadConfig) as error:
        problem = error.problem
        yield Fault(subject=problem.subject, message=problem.message, path=path, severity=Severity.WARNING)
        return
    base = subject.base
    if base is None and record.base_fingerprint is not None:
        yield Unchecked(reason=subject.why_no_base)
    if base is None or record.base_fingerprint is None or base.is_broken:
        return
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for trained records only

    if base.tensors and fingerprint(base.weights) != record.base_fingerprint:
        message = f"was not trained on {base.root}{_named(record)}"
        command = ["lora-tool", "validate", "--base", record.base_id or "MODEL", str(subject.checkpoint.root)]
        hint = shlex.join(command) if record.base_id else None
        yield Fault(subject="base.fingerprint", message=message, path=path, hint=hint)


@rule("LT520", Severity.WARNING, on=AdapterSubject, needs={Need.NAMES})
def base_not_named(subject: AdapterSubject) -> Iterator[Fault | Unchecked]:
    """The adapter names another base.

    What it does: Compares the base with the one that `adapter_config.json` names, if that one is on this disk: names,
    dtypes, shapes and samples of all weights, so that a copy, a link or the Hub cache counts as the same model. If it
    is not on this disk, the two Hub ids are compared; without two, the rule is skipped, unless LT507 can tell.
    Why it matters: Models of one family have the same names and shapes. PEFT silently loads the adapter onto any of
    them, and the result is garbage that looks fluent.
    Example: `base_model_name_or_path` is `Qwen/Qwen2.5-7B-Instruct`, but `--base` is `Qwen/Qwen2.5-7B`.
    What to do: Omit `--base` to use the named model, or correct `base_model_name_or_path`.

    If `--base` is right and the named model cannot be had: `--ignore LT520`.
    """
    base, named = subject.base, subject.config.base_model
    if base is None or not named or base.is_broken:
        return
    given, near, hub_id = source_of(base.root), subject.checkpoint.root, hub_id_of(named)
    try:
        if hub_id is not None and hub_id == given.hub_id and local_folder(named, near) is None:
            return  # without asking the cache, which takes a while
        found = resolve(named, near=near)
    except CheckpointError as error:
        if given.hub_id is not None and hub_id not in (None, given.hub_id):
            message = f"is {named}, but the base is {given.hub_id}"
            yield Fault(subject="base_model_name_or_path", message=message, path=subject.config_path)
        elif not _is_fingerprinted(subject):
            yield Unchecked(reason=_not_compared(base, error))
        return
    if found.path.samefile(base.root) or (found.hub_id is not None and found.hub_id == given.hub_id):
        return
    try:
        same = _is_same_model(found.path, base)
    except CheckpointError as error:
        yield Unchecked(reason=_not_compared(base, error))
        return
    if not same:
        there = f" ({found.path})" if str(found.path) != named else ""
        message = f"is {named}{there}, but the base is {given.hub_id or base.root}, whose weights differ"
        yield Fault(subject="base_model_name_or_path", message=message, path=subject.config_path)


@rule("LT521", Severity.INFO, on=AdapterSubject)
def base_moved(subject: AdapterSubject) -> Iterator[Fault]:
    """The path of the base in the adapter's config does not exist.

    What it does: If `base_model_name_or_path` is a path that does not exist and no `--base` is given, looks for a model
    in a folder of that name: in or beside the adapter's folder, beside its parent, or in the working directory.
    Why it matters: PEFT records the path as it was typed for training. On another machine, or from another folder, that
    path does not exist, and loading the adapter fails although the base is there.
    Example: `base_model_name_or_path` is `/workspace/llama-base`, but `llama-base` lies beside the adapter.
    What to do: Write the path into `adapter_config.json`: `lora-tool validate ADAPTER --fix` does it if the model fits.
    Or give the base each time: `--base MODEL`.
    """
    named, root = subject.config.base_model, subject.checkpoint.root
    if subject.base is not None or not named:
        return
    try:
        lost = hub_id_of(named) is None and local_folder(named, root) is None
    except CheckpointError:  # it means two folders
        return
    moved = moved_to(named, root) if lost else None
    if moved is not None:
        found = from_here(moved)
        message = f"is {named}, which holds no model; one of that name is at {found}"
        hint = (
            f"if it is the same model: lora-tool validate --fix {shlex.quote(str(root))}, or lora-tool validate "
            f"{shlex.quote(str(root))} --base {shlex.quote(str(found))}"
        )
        yield Fault(subject="base_model_name_or_path", message=message, path=subject.config_path, hint=hint)


def _is_same_model(named: Path, base: ModelDir) -> bool:
    """Whether the folder holds the weights of `base`, by samples. Raises `CheckpointError` where it holds no model."""
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for two bases only

    return fingerprint(open_model(named).weights) == fingerprint(base.weights)


def _not_compared(base: ModelDir, error: CheckpointError) -> str:
    """Return why the base was not compared with the one that the adapter names, which has this error."""
    return f"whether {base.root} is the base that the adapter names was not checked ({error}); if it is: --ignore LT520"


def _is_fingerprinted(subject: AdapterSubject) -> bool:
    """Whether `lora-tool train` recorded the base's fingerprint, so that LT507 compares the base."""
    path = _record_of(subject)
    try:
        return path is not None and read_training_record(path).base_fingerprint is not None
    except (CorruptFile, BadConfig):
        return False


def _record_of(subject: AdapterSubject) -> Path | None:
    """Return the record in the adapter's folder, or in that of the run that it is a checkpoint of."""
    root = subject.checkpoint.root
    for folder in (root, root.resolve().parent) if subject.checkpoint.folder.trainer else (root,):
        path = folder / training_record.FILE_NAME
        if path.is_file() and inside(folder, path):
            return path
    return None


def _named(record: TrainingRecord) -> str:
    if record.base_id is None:
        return ""
    revision = f"@{record.base_revision}" if record.base_revision else ""
    return f": {record.base_id}{revision}"


@rule("LT508", Severity.INFO, on=AdapterSubject, needs=_ALL)
def lora_on_tied_end(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on one end of tied embeddings.

    What it does: Looks for LoRA on the output layer or the embeddings of a base that uses one matrix for both. LoRA
    with the same ΔW on both, as PEFT trains it with `ensure_weight_tying`, is fine.
    Why it matters: Unmerged, the adapter works. PEFT's merge changes the shared matrix and with it the layer that was
    not trained; `lora-tool merge` refuses.
    Example: `target_modules` names `lm_head`, but the base's config has `"tie_word_embeddings": true`.
    What to do: Merge with `--untie`, which writes two matrices, or serve the adapter unmerged. Next time train with
    `ensure_weight_tying=True`, or on a base saved with `tie_word_embeddings=False`.
    """
    match = subject.match
    if not isinstance(match, BaseMatch) or subject.is_reward() or not _is_tied(match):
        return
    adapted = {f"{match.name(layer.target)}.weight": layer.target for layer in subject.layers}
    output = adapted.get(output_name(match.arch) or "")  # a head may have other layers, which nothing is tied to
    inputs = [layer.target for layer in subject.layers if layer.embedding and is_end(layer.target)]
    if output is not None and len(inputs) == 1 and add_the_same(subject.view, inputs[0], output):
        return
    for target in (*filter(None, [output]), *inputs):
        tensor = next(layer.any_tensor for layer in subject.layers if layer.target == target)
        message = (
            f"adapts `{target}`, but {match.base.root} ties embeddings and output layer: one matrix cannot hold both"
        )
        yield Fault(subject=tensor.name, message=message)


def _is_tied(match: BaseMatch) -> bool:
    config = match.base.config
    outputs = [name for name in match.arch.causal_only if name.endswith(".weight")]
    absent = bool(outputs) and outputs[0] not in match.base.tensors
    return absent or (config is not None and bool(config.tie_word_embeddings))


@rule("LT509", Severity.ERROR, on=AdapterSubject, needs=_ALL | {Need.SAME_NAMES}, unmergeable=True)
def token_beyond_base(subject: AdapterSubject) -> Iterator[Fault]:
    """A trained token that the base does not have.

    What it does: Compares `trainable_token_indices` with the number of rows of their embedding: the adapter's if it
    carries one, else the base's.
    Why it matters: The tokens were added before training, but the base lacks them. PEFT fails: index out of range.
    Example: Token 151,670 was trained, but the base's embedding has 151,666 rows.
    What to do: Give a base with the added tokens: call `model.resize_token_embeddings(ROWS)` and save it.
    """
    match = subject.matched
    for module, tokens in subject.view.tokens.items():
        held = subject.view.frozen.get(f"{module}.weight") or match.tensor(module)
        largest = max(tokens.indices, default=-1)
        if held is not None and held.shape and largest >= held.shape[0]:
            message = f"belongs to token {largest:,}, but `{held.name}` has {held.shape[0]:,} rows"
            yield Fault(subject=tokens.rows.name, message=message)


_DENSE = re.compile(r"(?P<block>.+\.\d+\.[^.]+)\.(?P<leaf>gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|w[123])")
"""A projection of a dense feed-forward block: its layer's block, and its own name."""


@rule("LT510", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.CONFIG, Need.NAMES}, unmergeable=True)
def dense_on_experts(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on a dense layer where the base has experts.

    What it does: Looks for LoRA on the projections of a feed-forward block, such as `mlp.up_proj`, in layers where the
    base has only a mixture of experts.
    Why it matters: The adapter was trained on the family's dense model. PEFT drops these layers with a warning and
    applies the others, such as attention, to a model that they were not trained on.
    Example: LoRA on `model.layers.0.mlp.up_proj`, but the base has `model.layers.0.block_sparse_moe.experts.0.w1`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    if subject.base is None or subject.base.config is None:
        return
    if not any(".experts." in name for name in subject.base.tensors):
        return
    dense_ones = tuple(subject.view.found(lambda layer: [layer] if _DENSE.fullmatch(layer.target) else []))
    if not dense_ones:
        return
    by_layer: dict[str, list[str]] = {}
    for name in subject.base.tensors:
        if place := _LAYER.match(name):
            by_layer.setdefault(place[0], []).append(name.rpartition(".")[0])
    for layer in dense_ones:
        found, at = _DENSE.fullmatch(layer.target), _LAYER.match(f"{layer.target}.")
        held = by_layer.get(at[0], []) if at else []
        experts = next((name for name in held if ".experts." in name), None)
        if found is None or experts is None:
            continue
        dense = [name for name in held if ".experts." not in name and ".shared" not in name]
        if not any(name.endswith(f".{found['leaf']}") for name in dense):
            message = f"adapts `{layer.target}`, but {subject.base.root} has experts there, such as `{experts}`"
            yield Fault(subject=layer.any_tensor.name, message=message)


_LAYER = re.compile(r".+?\.\d+(?=\.)")


@rule("LT511", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.NAMES})
def merged_before(subject: AdapterSubject) -> Iterator[Fault]:
    """The base already contains the adapter.

    What it does: Looks for the adapter's fingerprint in the manifest (`lora_tool.json`) of a base that is itself a
    merged model. Does the same for the adapters that this one was computed from (`combine`, `resize`, `prepare`,
    `convert`, `extract`), which its own manifest lists.
    Why it matters: Merged again, or loaded onto that model unmerged, the adapter is applied twice, and nothing fails.
    Example: `--base merged-model`, which was made from this very adapter, or from one of two that `combine` added up.
    What to do: Give the model that the adapter was trained on: `--base MODEL`. Use the merged model without the
    adapter. Of a sum, merge only the adapters that are not in the model yet.
    """
    manifest = subject.base.manifest if subject.base is not None else None
    if subject.base is None or manifest is None or not manifest.merged_adapters:
        return
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for merged bases only

    there, base = manifest.merged_adapters, subject.base.root
    if fingerprint(subject.checkpoint.weights) in there:
        yield Fault(message=f"{base} is a merged model that already contains this adapter")
        return
    inside = computed_from(subject.checkpoint)
    twice = {inside[own] or manifest.adapters.get(own, "") for own in inside if own in there}
    if twice:
        which = ", ".join(sorted(twice - {""})) or "an adapter"
        message = f"{base} is a merged model that already contains {which}, which this adapter was computed from"
        yield Fault(message=message)

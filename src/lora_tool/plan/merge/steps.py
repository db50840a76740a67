"""The steps of a merge: what happens to every tensor of the base and of the adapter."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.adapter.support import ALLOW_IN_MEMORY, OTHER_BASE, UNMERGED
from lora_tool.errors import IncompatibleBase, OnlyInMemory, UnsupportedAdapter
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.plan.adapter.target_parameters import stack_is_transposed
from lora_tool.plan.core.ops import BiasDelta, Dequantise, DoraDelta, LoraDelta, Op, ReplaceRows, copied_as
from lora_tool.plan.core.steps import Step
from lora_tool.plan.merge.context import MergeContext
from lora_tool.tensors import DType, StoredTensor, TensorSpec


def base_steps(merge: MergeContext) -> Iterator[Step]:
    """Yield a step for every tensor of the base that the output keeps, in the base's order."""
    for tensor in merge.base.tensors.values():
        if not is_dropped(merge, tensor.name):
            yield _step(merge, tensor)


def is_dropped(merge: MergeContext, name: str) -> bool:
    """Return whether the output leaves out this tensor of the base: a tied copy, or part of a head that it lacks."""
    return name in merge.ends.copies or (merge.head is not None and name in merge.arch.causal_only)


def _step(merge: MergeContext, tensor: StoredTensor) -> Step:
    module, _, leaf = tensor.name.rpartition(".")
    modules = merge.modules
    saved = modules.saved.get(tensor.name)
    if leaf == "bias":  # an adapter on an output layer carries it whole, and PEFT loads that over the base's
        saved = saved or modules.frozen_base.get(tensor.name)
    if leaf == "bias" and module in modules.lora_bias:
        return _bias_step(merge, tensor, saved or tensor, module)
    if saved is not None:
        return _replacement(merge, tensor, saved)
    if tensor.name in modules.parameters:
        return _parameter_step(merge, tensor)
    if leaf == "weight" and module in modules.tokens:
        return tokens_step(merge, tensor, module)
    if leaf == "weight" and module in modules.lora:
        # an adapter on an embedding carries the embedding that it was trained on, and PEFT loads that over the base's
        source = modules.frozen_base.get(tensor.name, tensor)
        _require_same_shape(merge, source, tensor)
        return lora_step(merge, source, tensor.name, module)
    return kept_step(merge, tensor)


def _bias_step(merge: MergeContext, tensor: StoredTensor, source: StoredTensor, module: str) -> Step:
    """Return the step that adds the biases of lora_B to `source`: the base's bias, or the trained one."""
    terms = merge.modules.lora_bias[module]
    for found in (source, *(term.bias for term in terms)):
        _require_same_shape(merge, found, tensor)
    op = BiasDelta(source=source, terms=terms)
    first = "the trained bias + " if source is not tensor else ""
    return Step(out=_spec(merge, tensor), op=op, action=TensorAction.MERGED, reason=f"{first}{op}")


def tokens_step(merge: MergeContext, tensor: StoredTensor, module: str) -> Step:
    """Return the step that puts the rows of `module` that were trained by themselves into its `tensor`."""
    rows = merge.modules.tokens[module]
    indices = next(part.tokens[module] for part in merge.adapted if module in part.tokens)
    source = merge.modules.frozen_base.get(tensor.name, tensor)
    _require_same_shape(merge, source, tensor)
    out = replace(_spec(merge, tensor), shape=source.shape)
    op = ReplaceRows(source=source, rows=rows, indices=indices)
    return Step(out=out, op=op, action=TensorAction.MERGED, reason=str(op))


def _spec(merge: MergeContext, tensor: StoredTensor) -> TensorSpec:
    dtype = merge.dtype if merge.dtype and tensor.dtype.is_float else own_dtype(merge, tensor)
    return TensorSpec(name=tensor.name, dtype=_at_least_as_loaded(merge, tensor.name, dtype), shape=tensor.shape)


def own_dtype(merge: MergeContext, tensor: StoredTensor) -> DType:
    """Return the dtype of a tensor of the base; for a quantised weight, that of the model."""
    return tensor.dtype if encoding_of(tensor) is None else merge.base.dtype or tensor.dtype


def _at_least_as_loaded(merge: MergeContext, name: str, dtype: DType) -> DType:
    """Return float32 instead of a 16-bit type for the few parameters that transformers keeps wide."""
    wide = merge.facts is not None and name in merge.facts.keep_in_fp32 and dtype in (DType.F16, DType.BF16)
    return DType.F32 if wide else dtype


def kept_step(merge: MergeContext, tensor: StoredTensor) -> Step:
    """Return the step of a tensor of the base that nothing changes: in the dtype of the output, dequantised."""
    out = _spec(merge, tensor)
    op = copied_as(out.dtype, tensor)
    if op.is_copy:
        return Step(out=out, op=op, action=TensorAction.COPIED, reason="as in the base")
    if isinstance(op, Dequantise):
        return Step(out=out, op=op, action=TensorAction.DEQUANTISED, reason=str(op))
    turned = ", where it is stored transposed" if tensor.is_transposed else ""
    return Step(
        out=out, op=op, action=TensorAction.CAST, reason=f"as in the base{turned}, {tensor.dtype} to {out.dtype}"
    )


def _replacement(merge: MergeContext, base: StoredTensor, saved: StoredTensor) -> Step:
    _require_same_shape(merge, saved, base)
    dtype = _at_least_as_loaded(merge, base.name, merge.dtype or own_dtype(merge, base))
    out = TensorSpec(name=base.name, dtype=dtype, shape=saved.shape)
    return Step(
        out=out,
        op=copied_as(out.dtype, saved),
        action=TensorAction.REPLACED,
        reason=f"saved whole in the adapter, as {saved.dtype}",
    )


def lora_step(merge: MergeContext, source: StoredTensor, name: str, module: str) -> Step:
    """Return the step that adds the module's deltas to `source` and writes it as `name`.

    The rules have compared their shapes. Raises `OnlyInMemory` for an init that is not recomputed here.
    """
    terms = merge.modules.lora[module]
    embedding = module in merge.modules.embeddings
    transposed = embedding or not merge.arch.conv1d.isdisjoint({module, module.rpartition(".")[2]})
    for term in terms:
        if source.shape != ((term.a.shape[1], term.b.shape[0]) if transposed else (term.b.shape[0], term.a.shape[1])):
            raise AssertionError("the rules let no delta of another shape pass")
    dtype = _at_least_as_loaded(merge, name, merge.dtype or _home_dtype(merge, source, name))
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    magnitude = merge.modules.magnitudes.get(module)
    carried = any(source is held for held in merge.modules.frozen_base.values())
    # PEFT leaves embeddings as they are, and loads a weight that the adapter carries over what the init changed
    init = None if embedding or carried else recomputed_init(merge, module)
    if init is not None and (len(terms) > 1 or (transposed and init == "olora")):
        why = "of several adapters" if len(terms) > 1 else "on a layer that is not linear"
        raise OnlyInMemory(
            f"{terms[0].b.path}: `{terms[0].b.name}`: `init_lora_weights` {init} {why} cannot be recomputed",
            hint=ALLOW_IN_MEMORY,
        )
    op: Op = LoraDelta(source=source, terms=terms, transposed=transposed, rounded=embedding, init=init)
    if magnitude is not None:
        (term,) = terms
        op = DoraDelta(source=source, term=term, magnitude=magnitude, transposed=transposed)
    return Step(out=out, op=op, action=TensorAction.MERGED, reason=str(op))


def recomputed_init(merge: MergeContext, module: str) -> str | None:
    """Return the init of the module's LoRA if it changed the base weight in a way that a merge computes again."""
    inits = (part.config.init_lora_weights for part in merge.adapted if module in part.modules.lora)
    return next((init for init in inits if init in INITS_RECOMPUTED), None)


def _parameter_step(merge: MergeContext, tensor: StoredTensor) -> Step:
    """Return the step of a parameter that has LoRA by itself: its shapes were checked against the model."""
    if merge.facts is None:
        raise AssertionError("LoRA on parameters is planned with the model's facts")
    terms = merge.modules.parameters[tensor.name]
    transposed = stack_is_transposed(tensor.name, merge.facts)
    source = merge.modules.frozen_base.get(tensor.name, tensor)  # of an output layer, which the adapter carries
    _require_same_shape(merge, source, tensor)
    op = LoraDelta(source=source, terms=terms, transposed=transposed, rounded=True)
    return Step(out=_spec(merge, tensor), op=op, action=TensorAction.MERGED, reason=str(op))


def _home_dtype(merge: MergeContext, source: StoredTensor, name: str) -> DType:
    """Return the output's type: the base's tensors keep theirs; a head that the adapter brings takes the model's."""
    home = merge.base.tensors.get(name)
    return own_dtype(merge, home) if home else merge.base.dtype or source.dtype


def _is_of_head(merge: MergeContext, name: str) -> bool:
    """Return whether a tensor has a row per label."""
    if merge.facts is not None:
        return merge.facts.has_row_per_label(name)
    return merge.head is not None and name.rpartition(".")[0] == merge.head.name.rpartition(".")[0]


def _require_same_shape(merge: MergeContext, found: StoredTensor, base: StoredTensor) -> None:
    expected, vocabulary = base.shape, merge.ends.vocabulary
    if vocabulary is not None and base.name in vocabulary.names:
        expected = (vocabulary.size, *base.shape[1:])
    # a head with other labels takes the place of the base's
    other_labels = _is_of_head(merge, base.name) and found.shape == (merge.labels, *expected[1:])
    if found.shape != expected and not other_labels:
        raise AssertionError(f"the rules let no `{found.name}` of another shape than `{base.name}` pass")


def added_steps(merge: MergeContext) -> Iterator[Step]:
    """Yield steps for the tensors that the base does not have: the head's."""
    for name, tensor in merge.modules.saved.items():
        if name in merge.base.tensors or (merge.ends.tied is not None and name == merge.ends.tied.output):
            continue  # replaced in its place, or the tied output layer, which `untying_steps` writes
        of_head = merge.head is not None and name.startswith(f"{merge.head.module}.")
        if not of_head and name not in merge.missing_keys and not _is_of_untied_output(merge, name):
            raise not_in_base(merge, tensor, name)
        dtype = _at_least_as_loaded(merge, name, merge.dtype or merge.base.dtype or tensor.dtype)
        out = TensorSpec(name=name, dtype=dtype, shape=tensor.shape)
        yield Step(
            out=out,
            op=copied_as(dtype, tensor),
            action=TensorAction.ADDED,
            reason=f"the trained {'head' if of_head else 'layer'}, {tensor.dtype} in the adapter",
        )
    head = merge.head
    if head is not None and f"{head.module}.weight" in merge.modules.frozen_base:
        name = f"{head.module}.weight"
        if head.module in merge.modules.lora and name not in merge.base.tensors:
            yield lora_step(merge, merge.modules.frozen_base[name], name, head.module)


def _is_of_untied_output(merge: MergeContext, name: str) -> bool:
    """Return whether it is the bias of an output layer that was saved whole, and is tied to another bias no longer."""
    facts = merge.facts
    return facts is not None and merge.ends.untied and name in facts.tied and name.rpartition(".")[0] == facts.output


def not_in_base(merge: MergeContext, tensor: StoredTensor, name: str) -> IncompatibleBase | UnsupportedAdapter:
    """Return the error that an adapter's tensor belongs to `name`, which the base lacks."""
    if merge.facts is not None and name in merge.facts.unsaved:
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` changes `{name}`, which {merge.facts.class_name} computes and does not "
            "save: the change would be lost, as it is in PEFT's merge",
            hint=UNMERGED,
        )
    if merge.facts is not None and merge.facts.tied.get(name) in merge.base.tensors:
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` belongs to `{name}`, which is tied to `{merge.facts.tied[name]}` in "
            f"{merge.facts.class_name}: the adapter trained it separately, but there is one matrix for both",
            hint=UNMERGED,
        )
    message = f"{tensor.path}: `{tensor.name}` belongs to `{name}`, which {merge.base.root} does not have"
    return IncompatibleBase(message, hint=OTHER_BASE)

"""The steps of a merge: what happens to every tensor of the base and of the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from lora_tool.adapters.support import ALLOW_IN_MEMORY, BIAS_WITHOUT_PLACE, OTHER_BASE, UNMERGED
from lora_tool.core.errors import IncompatibleBase, OnlyInMemory, UnsupportedAdapter
from lora_tool.core.keys import AdapterKey, Part, without_wrapped
from lora_tool.core.options import Options, Recorded, option
from lora_tool.core.tensors import DType, StoredTensor, TensorAction, TensorSpec, float_type
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.plans.adapter.combine import stack_is_transposed
from lora_tool.plans.core.ops import BiasDelta, Dequantise, DoraDelta, LoraDelta, Op, ReplaceRows, copied_as
from lora_tool.plans.core.options import FLOAT_DTYPE
from lora_tool.plans.core.steps import InputRecord, Step
from lora_tool.plans.merge.draft import Draft


@dataclass(frozen=True, kw_only=True)
class OutputType(Options):
    """The option of this pass."""

    dtype: DType | str | None = option(
        None,
        "Data type of all weights.  [default: each as in the base]",
        recorded=Recorded.AS_DECIDED,
        **FLOAT_DTYPE,
    )


def with_steps(draft: Draft, options: OutputType) -> Draft:
    """Return the draft with a step for every tensor of the output, by its name in memory."""
    draft = replace(draft, dtype=None if options.dtype is None else float_type(options.dtype))
    return replace(
        draft,
        steps=(*base_steps(draft), *added_steps(draft)),
        leftovers=(*dropped_from_base(draft), *draft.model.leftovers),
    )


def on_disk(draft: Draft, _: Options) -> Draft:
    """Return the draft with steps on the tensors that `save_pretrained` writes."""
    conversion = draft.model.conversion
    if conversion is None:
        return draft
    from lora_tool.plans.merge.fused.parts import steps_on_disk

    further = [kept_step(draft, tensor) for tensor in draft.model.further_layers]
    return replace(draft, steps=steps_on_disk(draft.model, conversion, draft.steps, draft.per_expert, further))


def base_steps(draft: Draft) -> Iterator[Step]:
    """Yield a step for every tensor of the base that the output keeps, in the base's order."""
    for tensor in draft.base.tensors.values():
        if not is_dropped(draft, tensor.name):
            yield _step(draft, tensor)


def is_dropped(draft: Draft, name: str) -> bool:
    """Return whether the output leaves out this tensor of the base: a tied copy, or part of a head that it lacks."""
    return name in draft.ends.copies or (draft.head is not None and name in draft.model.arch.causal_only)


def _step(draft: Draft, tensor: StoredTensor) -> Step:
    module, _, leaf = tensor.name.rpartition(".")
    modules = draft.modules
    saved = modules.saved.get(tensor.name)
    if leaf == "bias":  # an adapter on an output layer carries it whole, and PEFT loads that over the base's
        saved = saved or modules.frozen_base.get(tensor.name)
    if leaf == "bias" and module in modules.lora_bias:
        return _bias_step(draft, tensor, saved or tensor, module)
    if saved is not None:
        return _replacement(draft, tensor, saved)
    if tensor.name in modules.parameters:
        return _parameter_step(draft, tensor)
    if leaf == "weight" and module in modules.tokens:
        return tokens_step(draft, tensor, module)
    if leaf == "weight" and module in modules.lora:
        # an adapter on an embedding carries the embedding that it was trained on, and PEFT loads that over the base's
        source = modules.frozen_base.get(tensor.name, tensor)
        _require_same_shape(draft, source, tensor)
        return lora_step(draft, source, tensor.name, module)
    return kept_step(draft, tensor)


def _bias_step(draft: Draft, tensor: StoredTensor, source: StoredTensor, module: str) -> Step:
    """Return the step that adds the biases of lora_B to `source`: the base's bias, or the trained one."""
    terms = draft.modules.lora_bias[module]
    for found in (source, *(term.bias for term in terms)):
        _require_same_shape(draft, found, tensor)
    op = BiasDelta(source=source, terms=terms)
    first = "the trained bias + " if source is not tensor else ""
    return Step(out=_spec(draft, tensor), op=op, action=TensorAction.MERGED, reason=f"{first}{op}")


def tokens_step(draft: Draft, tensor: StoredTensor, module: str) -> Step:
    """Return the step that puts the trained rows (`trainable_token_indices`) of `module` into its `tensor`."""
    rows = draft.modules.tokens[module]
    indices = next(part.tokens[module] for part in draft.adapted if module in part.tokens)
    source = draft.modules.frozen_base.get(tensor.name, tensor)
    _require_same_shape(draft, source, tensor)
    out = replace(_spec(draft, tensor), shape=source.shape)
    op = ReplaceRows(source=source, rows=rows, indices=indices)
    return Step(out=out, op=op, action=TensorAction.MERGED, reason=str(op))


def _spec(draft: Draft, tensor: StoredTensor) -> TensorSpec:
    dtype = draft.dtype if draft.dtype and tensor.dtype.is_float else own_dtype(draft, tensor)
    return TensorSpec(name=tensor.name, dtype=_at_least_as_loaded(draft, tensor.name, dtype), shape=tensor.shape)


def own_dtype(draft: Draft, tensor: StoredTensor) -> DType:
    """Return the dtype of a tensor of the base; for a quantised weight, that of the model."""
    return tensor.dtype if encoding_of(tensor) is None else draft.base.dtype or tensor.dtype


def _at_least_as_loaded(draft: Draft, name: str, dtype: DType) -> DType:
    """Return float32 instead of a 16-bit type for the few parameters that transformers keeps wide."""
    wide = draft.model.facts is not None and name in draft.model.facts.keep_in_fp32 and dtype in (DType.F16, DType.BF16)
    return DType.F32 if wide else dtype


def kept_step(draft: Draft, tensor: StoredTensor) -> Step:
    """Return the step of a tensor of the base that nothing changes: in the dtype of the output, dequantised."""
    out = _spec(draft, tensor)
    op = copied_as(out.dtype, tensor)
    if op.is_copy:
        return Step(out=out, op=op, action=TensorAction.COPIED, reason="as in the base")
    if isinstance(op, Dequantise):
        return Step(out=out, op=op, action=TensorAction.DEQUANTISED, reason=str(op))
    transposed = ", where it is stored transposed" if tensor.is_transposed else ""
    return Step(
        out=out, op=op, action=TensorAction.CAST, reason=f"as in the base{transposed}, {tensor.dtype} to {out.dtype}"
    )


def _replacement(draft: Draft, base: StoredTensor, saved: StoredTensor) -> Step:
    if draft.model.is_turned(base.name):
        from lora_tool.plans.merge.model.converted import turned

        saved = turned(saved)
    _require_same_shape(draft, saved, base)
    dtype = _at_least_as_loaded(draft, base.name, draft.dtype or own_dtype(draft, base))
    out = TensorSpec(name=base.name, dtype=dtype, shape=saved.shape)
    mean = draft.modules.means.get(base.name)
    return Step(
        out=out,
        op=mean or copied_as(out.dtype, saved),
        action=TensorAction.REPLACED,
        reason=f"{'the mean of those' if mean else 'saved whole'} in the adapter{'s' if mean else ''}, as {saved.dtype}",
    )


def lora_step(draft: Draft, source: StoredTensor, name: str, module: str) -> Step:
    """Return the step that adds the module's deltas to `source` and writes it as `name`.

    The rules have compared their shapes. Raises `OnlyInMemory` for an init that is not recomputed here.
    """
    terms = draft.modules.lora[module]
    embedding = module in draft.modules.embeddings
    conv1d = not draft.model.arch.conv1d.isdisjoint({module, module.rpartition(".")[2]})
    transposed = (embedding or conv1d) is not draft.model.is_turned(name)
    for term in terms:
        if source.shape != ((term.a.shape[1], term.b.shape[0]) if transposed else (term.b.shape[0], term.a.shape[1])):
            raise AssertionError("the rules let no delta of another shape pass")
    dtype = _at_least_as_loaded(draft, name, draft.dtype or _home_dtype(draft, source, name))
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    magnitude = draft.modules.magnitudes.get(module)
    carried = any(source is held for held in draft.modules.frozen_base.values())
    # an init of PEFT leaves embeddings as they are; a weight that the adapter carries is loaded after the init
    init = None if embedding or carried else recomputed_init(draft, module)
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


def recomputed_init(draft: Draft, module: str) -> str | None:
    """Return the init of the module's LoRA if it changed the base weight in a way that a merge computes again."""
    for part in draft.adapted:
        if module in part.modules.lora and part.config.init_lora_weights in INITS_RECOMPUTED:
            return part.config.init_lora_weights
    return None


def _parameter_step(draft: Draft, tensor: StoredTensor) -> Step:
    """Return the step of a parameter with LoRA of its own: its shapes were checked against the model."""
    if draft.model.facts is None:
        raise AssertionError("LoRA on parameters is planned with the model's facts")
    terms = draft.modules.parameters[tensor.name]
    transposed = stack_is_transposed(tensor.name, draft.model.facts) is not draft.model.is_turned(tensor.name)
    source = draft.modules.frozen_base.get(tensor.name, tensor)  # of an output layer, which the adapter carries
    _require_same_shape(draft, source, tensor)
    op = LoraDelta(source=source, terms=terms, transposed=transposed, rounded=True)
    return Step(out=_spec(draft, tensor), op=op, action=TensorAction.MERGED, reason=str(op))


def _home_dtype(draft: Draft, source: StoredTensor, name: str) -> DType:
    """Return the output's type: the base's tensors keep theirs; a head that the adapter brings takes the model's."""
    home = draft.base.tensors.get(name)
    return own_dtype(draft, home) if home else draft.base.dtype or source.dtype


def _is_of_head(draft: Draft, name: str) -> bool:
    """Return whether a tensor has a row per label."""
    if draft.model.facts is not None:
        return draft.model.facts.has_row_per_label(name)
    return draft.head is not None and name.rpartition(".")[0] == draft.head.name.rpartition(".")[0]


def _require_same_shape(draft: Draft, found: StoredTensor, base: StoredTensor) -> None:
    expected, vocabulary = base.shape, draft.ends.vocabulary
    if vocabulary is not None and base.name in vocabulary.names:
        expected = (vocabulary.size, *base.shape[1:])
    # a head with other labels takes the place of the base's
    other_labels = _is_of_head(draft, base.name) and found.shape == (draft.labels, *expected[1:])
    if found.shape != expected and not other_labels:
        raise AssertionError(f"the rules let no `{found.name}` of another shape than `{base.name}` pass")


def added_steps(draft: Draft) -> Iterator[Step]:
    """Yield steps for the tensors that the base does not have: the head's."""
    for name, tensor in draft.modules.saved.items():
        if name in draft.base.tensors or (draft.ends.tied is not None and name == draft.ends.tied.output):
            continue  # replaced in its place, or the tied output layer, which `untying_steps` writes
        of_head = draft.head is not None and name.startswith(f"{draft.head.module}.")
        if not of_head and name not in draft.model.missing_keys and not _is_of_untied_output(draft, name):
            raise not_in_base(draft, tensor, name)
        dtype = _at_least_as_loaded(draft, name, draft.dtype or draft.base.dtype or tensor.dtype)
        out = TensorSpec(name=name, dtype=dtype, shape=tensor.shape)
        yield Step(
            out=out,
            op=draft.modules.means.get(name) or copied_as(dtype, tensor),
            action=TensorAction.ADDED,
            reason=f"the {'mean of the ' if name in draft.modules.means else ''}trained {'head' if of_head else 'layer'}, {tensor.dtype} in the adapter",
        )
    head = draft.head
    if head is not None and f"{head.module}.weight" in draft.modules.frozen_base:
        name = f"{head.module}.weight"
        if head.module in draft.modules.lora and name not in draft.base.tensors:
            yield lora_step(draft, draft.modules.frozen_base[name], name, head.module)


def _is_of_untied_output(draft: Draft, name: str) -> bool:
    """Return whether it is the bias of an output layer that was saved whole, and is tied to another bias no longer."""
    facts = draft.model.facts
    return facts is not None and draft.ends.untied and name in facts.tied and name.rpartition(".")[0] == facts.output


def not_in_base(draft: Draft, tensor: StoredTensor, name: str) -> IncompatibleBase | UnsupportedAdapter:
    """Return the error that an adapter's tensor belongs to `name`, which the base lacks."""
    if draft.model.facts is not None and name in draft.model.facts.unsaved:
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` changes `{name}`, which {draft.model.facts.class_name} computes and does not "
            "save: the change would be lost, as it is in PEFT's merge",
            hint=UNMERGED,
        )
    if draft.model.facts is not None and draft.model.facts.tied.get(name) in draft.base.tensors:
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` belongs to `{name}`, which is tied to `{draft.model.facts.tied[name]}` in "
            f"{draft.model.facts.class_name}: the adapter trained it separately, but there is one matrix for both",
            hint=UNMERGED,
        )
    message = f"{tensor.path}: `{tensor.name}` belongs to `{name}`, which {draft.base.root} does not have"
    return IncompatibleBase(message, hint=OTHER_BASE)


def dropped_from_base(draft: Draft) -> Iterator[InputRecord]:
    """Yield the tensors of the base that the output does not have, with the reason."""
    for tensor in draft.base.tensors.values():
        if is_dropped(draft, tensor.name):
            reason = f"a {draft.model.arch.sequence_classification} has no language-modelling head"
            if draft.head is None:
                reason = f"tied to {draft.ends.copies[tensor.name]}, which is written once"
            yield InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)


_WHOLE = frozenset({Part.PLAIN, Part.SAVED_MODULE})
"""Parts of an adapter that are a tensor of the model as they stand."""


def adapter_leftovers(draft: Draft) -> Iterator[InputRecord]:
    """Yield every tensor of the adapters with the output tensor that it is in, or why it is in none."""
    for part in draft.adapted:
        tensors, dropped = part.adapter.tensors, part.modules.dropped
        for name, key in part.adapter.keys.items():
            path = tensors[name].path
            if name in dropped:
                yield InputRecord(path=path, name=name, action=TensorAction.DROPPED, reason=dropped[name])
            else:
                how = "is" if key.part in _WHOLE else "in"
                yield InputRecord(
                    path=path, name=name, action=TensorAction.CONSUMED, reason=f"{how} {_destination(key)}"
                )


def _destination(key: AdapterKey) -> str:
    """Return the model's tensor that an adapter's tensor is, or goes into."""
    if key.part in _WHOLE or key.part in (Part.BASE_LAYER, Part.TOKENS_BASE):
        return without_wrapped(key.tensor)
    return f"{without_wrapped(key.module)}.{'bias' if key.leaf == 'bias' else 'weight'}"


def accounted_for(draft: Draft, _: Options) -> Draft:
    """Return the draft with what became of every tensor of the adapters. Raises where one is in no step, and why unknown."""
    leftovers = (*draft.leftovers, *adapter_leftovers(draft))
    whole: set[int] = set()
    for step in draft.steps:
        whole.update(map(id, step.op.inputs))
    left = []
    for part in draft.adapted:
        left += [(name, part) for name, tensor in part.adapter.tensors.items() if id(tensor) not in whole]
    if left:  # only rows of these are in a step, or nothing
        used = {(tensor.path, tensor.name) for step in draft.steps for tensor in step.op.inputs}
        accounted = used | {(item.path, item.name) for item in leftovers if item.action is TensorAction.DROPPED}
        for name, part in left:
            tensor = part.adapter.tensors[name]
            if (tensor.path, name) not in accounted:
                raise _unplaced(draft, tensor, _destination(part.adapter.keys[name]))
    return replace(draft, leftovers=leftovers)


def _unplaced(draft: Draft, tensor: StoredTensor, wanted: str) -> IncompatibleBase | UnsupportedAdapter:
    if (module := wanted.removesuffix(".bias")) in draft.modules.lora_bias and f"{module}.weight" in draft.base.tensors:
        return UnsupportedAdapter(f"{tensor.path}: `{tensor.name}`: {BIAS_WITHOUT_PLACE}", hint=UNMERGED)
    if wanted in draft.model.arch.causal_only and wanted not in draft.base.tensors:
        return IncompatibleBase(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which is tied to the embeddings of this base: "
            "a change of it would change both ends",
            hint=UNMERGED,
        )
    return not_in_base(draft, tensor, wanted)
